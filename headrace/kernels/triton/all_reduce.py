"""all_reduce_add_norm: sum of the ranks' rows, residual and RMSNorm in one launch, over memory that all GPUs see.

Of each row one program copies this rank's part to where the others read it, tells them, waits for theirs, and adds all
parts in the order of ranks, so that every rank gets the same bits (a one-shot all-reduce; no multicast). A row of a
given number always belongs to the same program and comes to lie in one of two places by turns: when a rank writes to
a place again, all others have answered its call in between, so they have read what was there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

MAX_PROGRAMS = 128
"""The most that a launch has. Programs that wait for each other must all be running: no more than multiprocessors."""
_ELEMENTS_PER_WARP = 512


class SharedRows:
    """The memory that the kernel works with, of one rank.

    Args:
        parts: [ranks] int64, addresses of each rank's [2, max_rows, width] numbers of the activations' type.
        flags: [ranks] int64, addresses of each rank's [num_programs or more, ranks] int32, zero at first.
        rank: this one.
        max_rows, width: of what is summed; a multiple of 8 in all.
        num_programs: the most of a launch, the same on all ranks.
    """

    def __init__(
        self,
        parts: torch.Tensor,
        flags: torch.Tensor,
        rank: int,
        max_rows: int,
        width: int,
        num_programs: int = MAX_PROGRAMS,
    ) -> None:
        self.parts = parts
        self.flags = flags
        self.rank = rank
        self.size = len(parts)
        self.max_rows = max_rows
        self.width = width
        self.num_programs = num_programs
        self.turns = torch.zeros(num_programs, dtype=torch.int32, device=parts.device)


def all_reduce_add_norm(
    shared: SharedRows,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """residual += sum of all ranks' x; out = rms_norm(residual): ``all_reduce``, ``add_rms_norm``.

    x, residual, out: [T, E], contiguous, T at most ``max_rows``; out may be x.
    """
    num_rows, width = x.shape
    assert num_rows <= shared.max_rows and width == shared.width
    block = triton.next_power_of_2(width)
    _all_reduce_add_norm_kernel[(min(num_rows, shared.num_programs),)](
        x,
        residual,
        weight,
        out,
        shared.parts,
        shared.flags,
        shared.turns,
        num_rows,
        shared.max_rows * width,
        eps,
        WIDTH=width,
        BLOCK=block,
        RANK=shared.rank,
        SIZE=shared.size,
        STRIDE=shared.num_programs,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), 16),
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _all_reduce_add_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    parts_ptr,
    flags_ptr,
    turns_ptr,
    num_rows,
    max_elements,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < WIDTH
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    kind = tl.pointer_type(x_ptr.dtype.element_ty)
    ours = tl.multiple_of(tl.load(parts_ptr + RANK).to(kind), 16)
    our_flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32))
    wait_for_previous(PDL)
    turn = tl.load(turns_ptr + program) + 1
    place = (turn % 2).to(tl.int64) * max_elements
    for row in range(program, num_rows, STRIDE):
        start = row * WIDTH + col
        tl.store(ours + place + start, tl.load(x_ptr + start, mask=inside), mask=inside)
    tl.debug_barrier()  # all of the program's stores are before its word to the others
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + program * SIZE + RANK, turn, sem="release", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            seen = tl.atomic_add(our_flags + program * SIZE + peer, 0, sem="acquire", scope="sys")
            while seen < turn:
                seen = tl.atomic_add(our_flags + program * SIZE + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    for row in range(program, num_rows, STRIDE):
        start = row * WIDTH + col
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for peer in tl.static_range(SIZE):
            part = tl.multiple_of(tl.load(parts_ptr + peer).to(kind), 16)
            total += tl.load(part + place + start, mask=inside, other=0.0, volatile=True).to(tl.float32)
        total = total.to(x_ptr.dtype.element_ty).to(tl.float32)  # as a sum that is stored
        total += tl.load(residual_ptr + start, mask=inside, other=0.0).to(tl.float32)
        stored = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + start, stored, mask=inside)
        total = stored.to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, axis=0) / WIDTH + eps)
        normed = total * scale * weight
        tl.store(out_ptr + start, normed.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(turns_ptr + program, turn)
