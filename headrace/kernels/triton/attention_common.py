"""What the kernels of attention share: what they are compiled for, places in the plan, queries, scores and results.

Legend: H query heads, K KV heads, G = H / K, D head dim, B block size, M rows of a tile (query rows x G), N keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from headrace.kernels.triton import attention_work as work

HIDDEN = tl.constexpr(-1.0e30)
"""Score of a key that a row must not see: finite, so that a row that sees none of an item's keys gets a partial of
weight zero instead of NaN."""

# Places in the plan's buffer.
NUM_ITEMS = tl.constexpr(work.NUM_ITEMS)
NUM_REDUCTIONS = tl.constexpr(work.NUM_REDUCTIONS)
NUM_SHORT = tl.constexpr(work.NUM_SHORT)
ROWS_AT = tl.constexpr(work.ROWS_AT)
ITEMS_AT = tl.constexpr(work.ITEMS_AT)
REDUCE_ROWS_AT = tl.constexpr(work.REDUCE_ROWS_AT)
REDUCE_STARTS_AT = tl.constexpr(work.REDUCE_STARTS_AT)
REDUCE_SLOTS_AT = tl.constexpr(work.REDUCE_SLOTS_AT)
ITEM_SIZE = tl.constexpr(work.ITEM_SIZE)
REQUEST = tl.constexpr(work.ITEM_FIELDS.index("item_request"))
KV_START = tl.constexpr(work.ITEM_FIELDS.index("item_kv_start"))
KV_END = tl.constexpr(work.ITEM_FIELDS.index("item_kv_end"))
ROW_START = tl.constexpr(work.ITEM_FIELDS.index("item_row_start"))
ROW_COUNT = tl.constexpr(work.ITEM_FIELDS.index("item_num_rows"))
PARTIAL_START = tl.constexpr(work.ITEM_FIELDS.index("item_partial_start"))

LOG2_E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 30)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """What a kernel is compiled for.

    block_d: head_dim rounded up to a power of two.
    block_m: rows of a tile, ``group`` for every query row.
    block_n: keys of one round.
    num_stages: rounds of keys in flight, the one being computed included.
    precision: of products; "ieee" for fp32, else ignored.
    kv_kind: "int8" or "fp8" codes with scales (``QuantizedCache``), or "packed": keys of 5 bits, values of 4; "" is a
        dense cache.
    k_token, v_token: of a quantized cache, codes of one token of one head.
    k_plane_codes, v_plane_codes, k_plane_scales, v_plane_scales: from one KV head of a block to the next.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_d: int
    block_size: int
    block_m: int
    block_n: int
    num_stages: int
    has_window: bool
    has_soft_cap: bool
    precision: str
    kv_kind: str = ""
    k_token: int = 0
    v_token: int = 0
    k_plane_codes: int = 0
    v_plane_codes: int = 0
    k_plane_scales: int = 0
    v_plane_scales: int = 0

    @property
    def is_scaled(self) -> bool:
        """Whether keys and values are codes times a scale."""
        return self.kv_kind in ("int8", "fp8")

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds several elements, and keys and values are decoded one by one."""
        return self.kv_kind == "packed"

    @property
    def k_size(self) -> int:
        """Elements in memory of one token's key."""
        return self.k_token or self.head_dim

    @property
    def v_size(self) -> int:
        """Elements in memory of one token's value."""
        return self.v_token or self.head_dim

    @property
    def has_whole_blocks(self) -> bool:
        """Whether a round holds whole blocks: then a lane's slot in its block is the same in every round."""
        return self.block_n % self.block_size == 0

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def k_stride(self) -> int:
        """Elements from one KV head of a block's keys to the next."""
        return self.k_plane_codes or self.block_size * self.head_dim

    @property
    def v_stride(self) -> int:
        """The same of values."""
        return self.v_plane_codes or self.block_size * self.head_dim


@triton.jit
def scaled(product, scale, soft_cap, C: tl.constexpr):
    """Products of queries and keys as capped scores, times log2(e)."""
    if C.has_soft_cap:
        # cap * tanh(x / cap), with tanh(y) = 1 - 2 / (1 + exp(2 y))
        exponent = product * (scale * 2.0 * LOG2_E / soft_cap)
        return soft_cap * LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp2(exponent)))
    else:
        return product * (scale * LOG2_E)


@triton.jit
def block_place(blocks, stride):
    """Where blocks begin. Without signs, so that 32 by 32 bits make 64 in one multiplication."""
    return blocks.to(tl.uint32).to(tl.uint64) * stride.to(tl.uint32).to(tl.uint64)


@triton.jit
def first_key(start, C: tl.constexpr):
    """Where rounds begin: at a block's first slot. Only a window makes ranges begin elsewhere."""
    if C.has_whole_blocks and C.has_window:
        return start // C.block_size * C.block_size
    else:
        return start


@triton.jit
def place_of(turn):
    """The unit of this program's turn. Items fall in length: with every other turn backwards no program gets the
    longest of each.

    No program takes another's units, so they need not all run at a time (``LaunchShape.num_resident``).
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    return turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)


@triton.jit
def load_ids(table, first, end, C: tl.constexpr, IS_MASKED: tl.constexpr):
    """[N] ids of the blocks that hold the keys from ``first`` on; 0 from ``end`` on."""
    lane = tl.arange(0, C.block_n)
    if C.has_whole_blocks:
        entry = table + (first // C.block_size + lane // C.block_size)
    else:
        entry = table + (first + lane) // C.block_size
    if IS_MASKED:
        return tl.load(entry, mask=first + lane < end, other=0)
    else:  # the loop's keys exist all, or none: one comparison for all lanes
        return tl.load(entry, mask=tl.broadcast_to(first < end, [C.block_n]), other=0)


@triton.jit
def load_queries(qkv_ptr, qkv_stride, rows_ptr, row_start, row, head, is_row, dim, C: tl.constexpr):
    """(token [M], position [M], q [M, D]) of a tile's rows and the dims ``dim``; 0 where there is no row."""
    token = tl.load(rows_ptr + (row_start + row) * 2, mask=is_row, other=0)
    position = tl.load(rows_ptr + (row_start + row) * 2 + 1, mask=is_row, other=0)
    place = token.to(tl.int64)[:, None] * qkv_stride + head[:, None] * C.head_dim + dim[None, :]
    q = tl.load(qkv_ptr + place, mask=is_row[:, None] & (dim < C.head_dim)[None, :], other=0.0)
    return token, position, q


@triton.jit
def store_tile(
    acc, top, total, out_ptr, out_stride, partials_ptr, log_sums_ptr, token, row, head, is_row, partial_start,
    dim, C: tl.constexpr,
):  # fmt: skip
    """A tile's rows and dims to the output, or to partial slots with their log2-sum-exp.

    A subtile whose rows all stand before an item's keys has summed nothing: zeros of weight zero.
    """
    mask = is_row[:, None] & (dim < C.head_dim)[None, :]
    total = tl.where(total > 0.0, total, 1.0)
    result = acc / total[:, None]
    if partial_start < 0:
        place = token.to(tl.int64)[:, None] * out_stride + head[:, None] * C.head_dim + dim[None, :]
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = (partial_start + row).to(tl.int64) * C.num_heads + head
        tl.store(partials_ptr + slot[:, None] * C.head_dim + dim[None, :], result, mask=mask)
        tl.store(log_sums_ptr + slot, top + tl.log2(total), mask=is_row)
