"""A grid whose programs wait for each other: only for launches of which every program is on the device at once."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.launch import INTERPRETED

_IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def arrive(counter_ptr):
    """Count this program in, after all that it has written; one thread of it does."""
    tl.debug_barrier()
    if _IS_INTERPRETED:
        tl.atomic_add(counter_ptr, 1)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_other;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.ne.u32 is_other, thread, 0;
            @!is_other red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l",
            [counter_ptr],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for(counter_ptr, target):
    """Until ``target`` arrivals are counted; what those programs wrote before is seen."""
    if not _IS_INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_other, is_early;
            .reg .u32 thread, arrived;
            mov.u32 thread, %tid.x;
            setp.ne.u32 is_other, thread, 0;
            @is_other bra finished;
            again:
            ld.acquire.gpu.global.u32 arrived, [$1];
            setp.lt.u32 is_early, arrived, $2;
            @is_early bra again;
            finished:
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [counter_ptr, target],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
