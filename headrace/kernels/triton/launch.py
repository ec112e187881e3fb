"""What every launch needs to know of the device: how many programs fill it, and programmatic dependent launch.

With programmatic dependent launch (compute capability 9 and up) a kernel may start while the one before it still runs.
Every kernel here lets the next one start at once (``let_next_start``) and calls ``wait_for_previous`` before it touches
anything that an earlier kernel wrote or reads: what stands before the wait (loads of weights, table lookups of
constants) overlaps with the previous kernel. A kernel that waits has waited for all before it, since each of them did.
One pair does it otherwise: ``long_tiles_kernel`` lets the next one start after its own wait, so that a
``short_tiles_kernel`` behind it begins without one, and waits before it ends instead.

Triton compiles a kernel anew for integers that are 1 or multiples of 16 and for pointers that are aligned. Counts of
rows and outputs (``do_not_specialize``) and pointers to one number a row (``do_not_specialize_on_alignment``) are left
out of that: they differ from step to step and speed up no load. Strides and pointers to rows are not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU."""
IS_INTERPRETED = tl.constexpr(INTERPRETED)
"""The same, for kernels to ask."""

HOPPER_MULTIPROCESSORS = 132
"""Of an H200, on which tiles and launches for Hopper were measured."""

_DEPENDENT_LAUNCH_ARCH = 90
_HOPPER = 9
_INTERPRETED_MULTIPROCESSORS = 3


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; a small number in the interpreter, so that persistent loops go round there."""
    return _INTERPRETED_MULTIPROCESSORS if INTERPRETED else _property(device, "multiprocessor_count")


def max_shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have; none in the interpreter."""
    return 0 if INTERPRETED else _property(device, "max_shared_mem")


@functools.cache
def _property(device: torch.device, name: str) -> int:
    active = driver.active
    index = active.get_current_device() if device.index is None else device.index
    return int(active.utils.get_device_properties(index)[name])


@functools.cache
def architecture() -> int:
    """Compute capability of the current device, 90 for 9.0; 0 in the interpreter."""
    return 0 if INTERPRETED else int(driver.active.get_current_target().arch)


def has_wgmma() -> bool:
    """Whether the device has the asynchronous matrix units of several kernels here: Hopper's alone."""
    return architecture() // 10 == _HOPPER


@functools.cache
def launch_options() -> dict[str, Any]:
    """Keyword arguments of every launch: the kernel's ``PDL`` and what asks the driver for it."""
    return {"PDL": True, "launch_pdl": True} if architecture() >= _DEPENDENT_LAUNCH_ARCH else {"PDL": False}


def compile_ahead(kernel: Any, *args: Any, **options: Any) -> None:
    """Compile and load what a launch with these arguments needs, without launching; nothing in the interpreter.

    Of tensors only type and alignment count; they may be of the device "meta".
    """
    if not INTERPRETED:
        compiled = kernel.warmup(*args, grid=(1,), **options)
        if compiled is not None:
            compiled._init_handles()  # else the driver loads it at the first launch


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel to start as soon as all programs of this one have."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until everything that earlier kernels wrote is there, and everything they read may be overwritten."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch_rows(pointers, NUM_BYTES: tl.constexpr):
    """Ask for NUM_BYTES (a multiple of 16) at each of the 16-byte aligned pointers to come to the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
        "=r,l,r",
        [pointers, tl.full(pointers.shape, NUM_BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
