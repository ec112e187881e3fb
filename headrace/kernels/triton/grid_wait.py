"""A grid whose programs wait for each other, those of other GPUs' grids included: only for launches of which every
program is on its device at once. Counters may wrap around."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.launch import IS_INTERPRETED


def _count_in(scope: str) -> tl.constexpr:
    """One thread adds 1 at $1, after what it has seen written."""
    return tl.constexpr(
        f"""{{
        .reg .pred is_other;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.ne.u32 is_other, thread, 0;
        @!is_other red.release.{scope}.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }}"""
    )


def _spin(scope: str) -> tl.constexpr:
    """One thread waits until what is at $1 has reached $2."""
    return tl.constexpr(
        f"""{{
        .reg .pred is_other, is_early;
        .reg .u32 thread, arrived;
        .reg .s32 ahead;
        mov.u32 thread, %tid.x;
        setp.ne.u32 is_other, thread, 0;
        @is_other bra finished;
        again:
        ld.acquire.{scope}.global.u32 arrived, [$1];
        sub.s32 ahead, arrived, $2;
        setp.lt.s32 is_early, ahead, 0;
        @is_early bra again;
        finished:
        mov.u32 $0, 0;
        }}"""
    )


_COUNT_IN, _COUNT_IN_ANYWHERE = _count_in("gpu"), _count_in("sys")
_SPIN, _SPIN_FOR_ALL = _spin("gpu"), _spin("sys")


@triton.jit
def arrive(counter_ptr):
    """Count this program in, after all that it has written; one thread of it does."""
    tl.debug_barrier()
    if IS_INTERPRETED:
        tl.atomic_add(counter_ptr, 1)
    else:
        tl.inline_asm_elementwise(_COUNT_IN, "=r,l", [counter_ptr], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def arrive_anywhere(counter_ptr):
    """The same at a counter that any GPU may have."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _COUNT_IN_ANYWHERE, "=r,l", [counter_ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for(counter_ptr, target):
    """Until ``target`` arrivals are counted; what those programs wrote before is seen."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            _SPIN, "=r,l,r", [counter_ptr, target], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def wait_for_all(counter_ptr, target):
    """The same where programs of other GPUs arrive, too."""
    tl.inline_asm_elementwise(
        _SPIN_FOR_ALL, "=r,l,r", [counter_ptr, target], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
