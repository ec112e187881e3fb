"""A few rows of x times weights on Hopper, as fast as the weights can be read.

One warp asks for tiles of the weights and of x, many of them ahead, by the copy engine (TMA); the others multiply them
with the asynchronous matrix units as they come. Weights depend on no kernel before, so the first of them are asked for
while that one still runs. x is an operand of 64 rows, of which only those in use are copied: products of the others,
of whatever lies in shared memory, are not stored.

Legend: T rows of x, n outputs of a program, k inputs of a round.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from headrace.kernels.triton.launch import let_next_start, wait_for_previous
from headrace.kernels.triton.ring_slots import next_slot

MAX_ROWS = 64
"""Of x: those of one operand of the matrix units."""

_ROWS = gl.constexpr(MAX_ROWS)
_COPYING_REGISTERS = gl.constexpr(40)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Of weights and x, as the copy engine leaves them and the matrix units read them."""


@gluon.jit
def _copy_rounds(x, weight, rings, barriers, row, num_rounds, PDL: gl.constexpr):
    """Weights of the first rounds before the previous kernel has ended, then x; then all others."""
    x_ring, ring = rings
    full, empty = barriers
    NUM_STAGES: gl.constexpr = ring.shape[0]
    K: gl.constexpr = ring.shape[2]
    COPIED: gl.constexpr = x.block_type.shape[0]
    NUM_BYTES: gl.constexpr = (COPIED + ring.shape[1]) * K * 2
    for ahead in gl.static_range(NUM_STAGES):
        if ahead < num_rounds:
            mbarrier.expect(full.index(ahead), NUM_BYTES)
            tma.async_copy_global_to_shared(weight, [row, ahead * K], full.index(ahead), ring.index(ahead))
    wait_for_previous(PDL)
    for ahead in gl.static_range(NUM_STAGES):
        if ahead < num_rounds:
            rows = x_ring.index(ahead).slice(0, COPIED, dim=0)
            tma.async_copy_global_to_shared(x, [0, ahead * K], full.index(ahead), rows)
    slot, phase = 0, 0
    for number in range(NUM_STAGES, num_rounds):
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), NUM_BYTES)
        tma.async_copy_global_to_shared(weight, [row, number * K], full.index(slot), ring.index(slot))
        rows = x_ring.index(slot).slice(0, COPIED, dim=0)
        tma.async_copy_global_to_shared(x, [0, number * K], full.index(slot), rows)
        slot, phase = next_slot(slot, phase, NUM_STAGES)


@gluon.jit
def _multiply(rings, barriers, row, num_rounds, to, HAS_BIAS: gl.constexpr):
    x_ring, ring = rings
    full, empty = barriers
    NUM_STAGES: gl.constexpr = ring.shape[0]
    N: gl.constexpr = ring.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    acc = gl.full([_ROWS, N], 0.0, gl.float32, SUMS)
    slot, phase = 0, 0
    for _ in range(num_rounds):
        mbarrier.wait(full.index(slot), phase)
        acc = hopper.warpgroup_mma(x_ring.index(slot), ring.index(slot).permute((1, 0)), acc, is_async=True)
        # products under way at the end of a round would be made synchronous by the assembler
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, NUM_STAGES)
    _store(acc, row, to, HAS_BIAS)


@gluon.constexpr_function
def _lines(num_outputs, num_warps):
    """Four neighbouring outputs a thread."""
    across = min(32, num_outputs // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit
def _store(acc, row, to, HAS_BIAS: gl.constexpr):
    """acc [64, n] to out [T, col + n]."""
    bias_ptr, out_ptr, num_rows, num_outputs, col, out_stride = to
    if HAS_BIAS:
        place = row + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias_ptr + place, mask=place < num_outputs, other=0.0).to(gl.float32)[None, :]
    LINES: gl.constexpr = _lines(acc.shape[1], gl.num_warps())
    numbers = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LINES)
    token = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LINES))
    output = row + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LINES))
    inside = (token < num_rows)[:, None] & (output < num_outputs)[None, :]
    gl.store(
        out_ptr + (token.to(gl.int64)[:, None] * out_stride + (col + output)[None, :]), numbers, mask=inside
    )


@gluon.jit(do_not_specialize=["num_rows", "num_outputs", "num_rounds", "col"])
def few_rows_kernel(
    x, weight, bias_ptr, out_ptr, num_rows, num_outputs, num_rounds, col, out_stride,
    NUM_STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [T, col + n] = x [T, K] weight [n, K]^T + bias.

    x, weight: descriptors of tiles [T or more, k] and [n, k], 16-bit numbers.
    NUM_STAGES: rounds in shared memory.
    """
    let_next_start(PDL)
    N: gl.constexpr = weight.block_type.shape[0]
    K: gl.constexpr = weight.block_type.shape[1]
    ring = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES, N, K], TILE)
    x_ring = gl.allocate_shared_memory(x.dtype, [NUM_STAGES, _ROWS, K], TILE)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(empty.index(index), count=1)
    hopper.fence_async_shared()
    row, rings, barriers = gl.program_id(0) * N, (x_ring, ring), (full, empty)
    to = (bias_ptr, out_ptr, num_rows, num_outputs, col, out_stride)
    gl.warp_specialize(
        [
            (_multiply, (rings, barriers, row, num_rounds, to, HAS_BIAS)),
            (_copy_rounds, (x, weight, rings, barriers, row, num_rounds, PDL)),
        ],
        [1],
        [_COPYING_REGISTERS],
    )
