"""A ring of weight tiles in shared memory, and products of one row that consume it.

A program of a persistent kernel asks for the tiles of all its products in one order, over parts and layers, and always
``num_slots`` of them ahead of the one that it multiplies: which weights come next depends on nothing that is
computed. So memory goes on delivering while programs wait for each other (as in the "no bubbles" megakernels of
Hazy Research).

The parts of a layer that are products: query-key-value, output, gate and up, down. All have tiles of one shape, each
program at least one row of tiles (one outside of the matrix, where there are fewer than programs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from headrace.kernels.triton.gluon_names import async_load
from headrace.kernels.triton.source_digest import digest_of
from headrace.kernels.triton.stack_places import NUM_PLACES

NUM_WARPS = 8
_ALIGNMENT, _NUMBER_BYTES = 16, 2
_UNIT, _NUM_PLACES = gl.constexpr(_ALIGNMENT), gl.constexpr(NUM_PLACES)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [NUM_WARPS, 1], [1, 0]))
"""A warp has whole rows, so that sums do not cross warps."""
EIGHTS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 32, 1], [NUM_WARPS, 1, 1], [2, 1, 0]))
PARTIAL = gl.constexpr(gl.SliceLayout(2, EIGHTS.value))


@dataclass(frozen=True, slots=True)
class RingConfig:
    """The tiles of the four products of a layer.

    num_rows, block_k: of a tile.  num_slots: tiles in the ring.
    outputs, inputs: of each product; the third has two matrices of so many outputs each, whose rows share tiles.
    """

    num_rows: int
    block_k: int
    num_slots: int
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    sources: str = field(default=digest_of(__file__), kw_only=True)

    @property
    def is_packed(self) -> bool:
        """Whether weights are 4-bit codes (``PackedRingConfig``)."""
        return False

    @property
    def block_inputs(self) -> int:
        """The most inputs that a product has, rounded up to a power of two."""
        return int(triton.next_power_of_2(max(self.inputs)))

    def lines(self, part: int) -> int:
        """Outputs of a tile."""
        return self.num_rows // 2 if part == 2 else self.num_rows

    def units(self, part: int) -> int:
        """Inputs in units of 16, whose multiples Triton knows to be aligned."""
        return self.inputs[part] // _ALIGNMENT

    def rounds(self, part: int) -> int:
        """Tiles side by side."""
        return self.inputs[part] // self.block_k

    def row_tiles(self, part: int) -> int:
        """Tiles one below the other."""
        return -(-self.outputs[part] // self.lines(part))

    def per_layer(self, num_programs: int) -> int:
        """Tiles that the busiest program has of a layer."""
        return sum(-(-self.row_tiles(part) // num_programs) * self.rounds(part) for part in range(4))


def ring_config(
    outputs: Sequence[int], inputs: Sequence[int], num_programs: int, num_bytes: int
) -> RingConfig | None:
    """The tiles of 16-bit weights with which the busiest program has least to do; None: none fits the sizes.

    num_bytes: of shared memory for the ring and for the inputs of a product.
    """
    best: RingConfig | None = None
    ring_bytes = num_bytes - _NUMBER_BYTES * triton.next_power_of_2(max(inputs))
    for num_rows in (16, 8):
        for block_k in (1024, 512, 256):
            size = _NUMBER_BYTES * num_rows * block_k
            config = RingConfig(num_rows, block_k, ring_bytes // size, tuple(outputs), tuple(inputs))
            fits = all(k % block_k == 0 for k in inputs) and config.num_slots >= 3
            if fits and (best is None or _work(config, num_programs) < 0.98 * _work(best, num_programs)):
                best = config
    return best


def _work(config: RingConfig, num_programs: int) -> float:
    """Numbers that the busiest program reads of a layer, a little more for each tile."""
    return config.per_layer(num_programs) * (config.num_rows * config.block_k + 2048)


@gluon.jit
def make_ring(dtype: gl.constexpr, R: gl.constexpr):
    """[num_slots, num_rows, block_k] in shared memory."""
    return gl.allocate_shared_memory(dtype, [R.num_slots, R.num_rows, R.block_k], ROWS)


@gluon.jit
def count_tiles(PART: gl.constexpr, R: gl.constexpr):
    """Rows of tiles of this program, one at least."""
    return gl.maximum(gl.cdiv(R.row_tiles(PART) - gl.program_id(0), gl.num_programs(0)), 1)


@gluon.jit
def select(part, first, second, third, fourth):
    """The one of a part."""
    return gl.where(part < 2, gl.where(part == 0, first, second), gl.where(part == 2, third, fourth))


@gluon.jit
def ask_next(ring, place, weights_ptr, C: gl.constexpr, R: gl.constexpr):
    """Ask for the tile at a place of the order.

    place: (slot, layer, part, row of tiles, round, offset of the part's matrix in units of 16 elements, and of the next
    part's, which is loaded long before it is used).
    """
    slot, layer, part, tile, round, offset, _ = place
    HALF: gl.constexpr = R.num_rows // 2
    k = select(part, R.units(0), R.units(1), R.units(2), R.units(3)) * _UNIT
    n = select(part, R.outputs[0], R.outputs[1], R.outputs[2], R.outputs[3])
    is_pair = part == 2
    line = gl.arange(0, R.num_rows, layout=gl.SliceLayout(1, TILE))
    col = gl.arange(0, R.block_k, layout=gl.SliceLayout(0, TILE))
    is_second = is_pair & (line >= HALF)
    line = gl.where(is_second, line - HALF, line)
    first = (gl.program_id(0) + tile * gl.num_programs(0)) * gl.where(is_pair, HALF, R.num_rows)
    start = weights_ptr + offset * _UNIT + (first.to(gl.int64) * k + round * R.block_k)
    away = (line + gl.where(is_second, n, 0)) * k
    inside = (first + line < n) & (layer < C.num_layers)
    away = away[:, None] + col[None, :]
    async_load(
        ring.index(slot),
        start + away,
        mask=gl.broadcast(inside[:, None], away)[0],
        eviction_policy="evict_first",
    )
    async_copy.commit_group()


@gluon.jit
def advance(place, counts, places_ptr, C: gl.constexpr, R: gl.constexpr):
    """The place after one, in order. Before a round's loads and copies: at its branch the program would wait until all
    of them are on their way."""
    slot, layer, part, tile, round, offset, next_offset = place
    slot = gl.where(slot == R.num_slots - 1, 0, slot + 1)
    round += 1
    if round == select(part, R.rounds(0), R.rounds(1), R.rounds(2), R.rounds(3)):
        round = 0
        tile += 1
        if tile == select(part, counts[0], counts[1], counts[2], counts[3]):
            tile = 0
            layer = gl.where(part == 3, layer + 1, layer)
            part = gl.where(part == 3, 0, part + 1)
            offset = next_offset
            next_offset = _offset(places_ptr, layer, part + 1, C)
    return slot, layer, part, tile, round, offset, next_offset


@gluon.jit
def first_place(zero, places_ptr, C: gl.constexpr):
    """Where ``ask_next`` begins."""
    return zero, zero, zero, zero, zero, _offset(places_ptr, 0, 0, C), _offset(places_ptr, 0, 1, C)


@gluon.jit
def _offset(places_ptr, layer, part, C: gl.constexpr):
    """Where a part's matrix begins, in units of 16 elements; of the last layer's behind it."""
    layer = gl.minimum(layer + part // 4, C.num_layers - 1)
    return gl.load(places_ptr + layer * _NUM_PLACES + part % 4) // _UNIT


@gluon.jit
def _columns(x_view, round, R: gl.constexpr):
    """fp32 [block_k]: what a round multiplies."""
    rows = x_view._reinterpret(x_view.dtype, [R.block_inputs // R.block_k, R.block_k], FLAT)
    return rows.index(round).load(gl.SliceLayout(0, TILE)).to(gl.float32)


@gluon.jit
def product(
    flow, slot, place, scale, bias_ptr, out_ptrs, PART: gl.constexpr, NUM_OUTS: gl.constexpr, C: gl.constexpr,
    R: gl.constexpr,
):  # fmt: skip
    """out = scale * W x (+ bias), or with two matrices act(scale * W_0 x) * (scale * W_1 x), of this program's rows.

    flow: (ring, x in shared memory, rows of tiles of each part, weights, places).  slot: of the first tile.
    out_ptrs: NUM_OUTS places for the same numbers.  Returns: the next slot to take, the next place to ask for.
    """
    ring, x_view, counts, weights_ptr, places_ptr = flow
    dtype: gl.constexpr = x_view.dtype
    for tile in range(counts[PART]):
        acc = gl.full([R.num_rows, R.block_k // 8], 0.0, gl.float32, PARTIAL)
        for round in range(R.rounds(PART)):
            following = advance(place, counts, places_ptr, C, R)
            async_copy.wait_group(R.num_slots - 1)
            w = ring.index(slot).load(TILE)
            ask_next(ring, place, weights_ptr, C, R)
            place = following
            slot = gl.where(slot == R.num_slots - 1, 0, slot + 1)
            x = _columns(x_view, round, R)
            eight = (w.to(gl.float32) * x[None, :]).reshape([R.num_rows, R.block_k // 8, 8])
            eight = gl.convert_layout(eight, EIGHTS, assert_trivial=True)
            acc += gl.convert_layout(gl.sum(eight, axis=2), PARTIAL)
        y = gl.sum(acc, axis=1) * scale
        finish_rows(y, tile, out_ptrs, bias_ptr, dtype, PART, NUM_OUTS, C.has_bias, C, R)
    return slot, place


@gluon.jit
def finish_rows(
    y, tile, out_ptrs, bias_ptr, dtype: gl.constexpr, PART: gl.constexpr, NUM_OUTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, C: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Activate and store the sums of a row of tiles, fp32 [num_rows]."""
    line = gl.arange(0, R.num_rows, layout=y.type.layout)
    first = (gl.program_id(0) + tile * gl.num_programs(0)) * R.lines(PART)
    if PART == 2:
        y = y.to(dtype).to(gl.float32)
        gate, up = _half(y, line < R.num_rows // 2, R), _half(y, line >= R.num_rows // 2, R)
        row = first + gl.arange(0, R.num_rows // 2, layout=gate.type.layout)
        y = _activate(gate, C.is_silu) * up
        inside = row < R.outputs[PART]
    else:
        row = first + line
        inside = row < R.outputs[PART]
        if PART == 0 and HAS_BIAS:
            y += gl.load(bias_ptr + row, mask=inside, other=0.0).to(gl.float32)
    for index in gl.static_range(NUM_OUTS):
        gl.store(out_ptrs[index] + row, y.to(dtype), mask=inside)


@gluon.jit
def _half(y, is_half, R: gl.constexpr):
    """The rows of one of two matrices."""
    return gl.sum(gl.where(is_half, y, 0.0).reshape([2, R.num_rows // 2]), axis=0)


@gluon.jit
def _activate(gate, IS_SILU: gl.constexpr):
    """As ``activation.activate``."""
    if IS_SILU:
        return gate / (1.0 + gl.exp(-gate))
    else:
        return gate / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
