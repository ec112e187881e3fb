"""What a library's dense attention needs around it: keys out of blocks, a chunk padded, parts merged.

Legend: T rows of a chunk, S rows of its square (what stands in front of them and behind them included), H query heads,
K KV heads, D head dim, B block size, N keys of a piece of the context.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous

MERGED_AT_ONCE = 4
"""Parts that one launch of the merge reads beside what earlier ones left."""

_HEADS = 8
_GATHERED_KEYS = 32


class Part(NamedTuple):
    """Attention to some of the keys. result: [rows, H, D], contiguous; log_sums: [H, rows] fp32, contiguous, of exp."""

    result: torch.Tensor
    log_sums: torch.Tensor


class PagedKeys(NamedTuple):
    """One request's keys and values: k_cache, v_cache [num_blocks, K, B, D] as the attention op gets them,
    block_table [R, max_blocks] int32, and the request's row of it."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    request: int


def stage_chunk(
    staged: torch.Tensor,
    num_square: int,
    qkv: torch.Tensor,
    first_token: int,
    num_rows: int,
    keys: PagedKeys,
    first_key: int,
    num_front: int,
    num_heads: int,
) -> None:
    """Lay out a chunk like qkv, with the end of its context before it and zeros behind it.

    Args:
        staged: [at least S, (H+2K)*D]; rows [0, num_square) are written.
        first_token, num_rows: the chunk's rows of ``qkv``; they come to staged[num_front : num_front + num_rows].
        first_key, num_front: positions whose keys and values come to staged[:num_front]; queries there are zero.
    """
    _, num_kv_heads, block_size, head_dim = keys.k_cache.shape
    num_all = num_heads + 2 * num_kv_heads
    assert staged.stride(0) == num_all * head_dim
    _stage_kernel[(num_square, triton.cdiv(num_all, _HEADS))](
        staged,
        qkv,
        keys.k_cache,
        keys.v_cache,
        keys.block_table,
        qkv.stride(0),
        keys.k_cache.stride(0),
        first_token,
        num_rows,
        num_front,
        first_key,
        keys.request * keys.block_table.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        num_warps=4,
        **launch_options(),
    )


def gather_piece(piece: torch.Tensor, keys: PagedKeys, first_key: int) -> None:
    """Keys and values of positions [first_key, first_key + N) into ``piece`` [2, K, N, D], contiguous."""
    _, num_kv_heads, num_keys, head_dim = piece.shape
    _gather_kernel[(triton.cdiv(num_keys, _GATHERED_KEYS), num_kv_heads)](
        piece,
        keys.k_cache,
        keys.v_cache,
        keys.block_table,
        keys.k_cache.stride(0),
        num_keys,
        first_key,
        keys.request * keys.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=keys.k_cache.shape[2],
        BLOCK_N=_GATHERED_KEYS,
        num_warps=4,
        **launch_options(),
    )


def merge_parts(
    parts: list[Part],
    num_skipped: int,
    num_rows: int,
    carry: Part | None,
    out: torch.Tensor | None = None,
    first_token: int = 0,
) -> Part | None:
    """One attention from parts over different keys, weighted by their share of the whole sum.

    Args:
        parts: 1 to ``MERGED_AT_ONCE``; rows [0, num_rows) of each, but of the first those after ``num_skipped``.
        carry: what an earlier merge returned.
        out: [tokens, H*D]; the result comes to rows [first_token, first_token + num_rows). None: to a new carry, fp32,
            which is returned and takes the place of the one given.
    """
    first, rest = parts[0], parts[1:]
    num_heads, head_dim = first.result.shape[1:]
    target = carry
    if out is None and target is None:
        device = first.result.device
        target = Part(
            torch.empty((num_rows, num_heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((num_heads, num_rows), dtype=torch.float32, device=device),
        )
    filled = [first, *rest, *[first] * (MERGED_AT_ONCE - len(parts))]
    unused = first.log_sums  # never read: of the type that the kernel is compiled for
    _merge_kernel[(num_rows, triton.cdiv(num_heads, _HEADS))](
        *(part.result for part in filled),
        *(part.log_sums for part in filled),
        unused if target is None else target.result,
        unused if target is None else target.log_sums,
        first.result if out is None else out,
        0 if out is None else out.stride(0),
        len(parts),
        int(carry is not None),
        num_skipped,
        first.log_sums.stride(0),
        rest[0].log_sums.stride(0) if rest else 0,
        num_rows,
        first_token,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
        IS_LAST=out is not None,
        num_warps=4,
        **launch_options(),
    )
    return None if out is not None else target


@triton.jit(do_not_specialize=["first_token", "num_rows", "num_front", "first_key", "table_at"])
def _stage_kernel(
    staged_ptr, qkv_ptr, k_ptr, v_ptr, table_ptr, qkv_stride, block_stride, first_token, num_rows, num_front,
    first_key, table_at, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    NUM_ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_D)
    inside = (head < NUM_ALL)[:, None] & (dim < HEAD_DIM)[None, :]
    wait_for_previous(PDL)
    is_front = row < num_front
    is_own = (row >= num_front) & (row < num_front + num_rows)
    place = head[:, None] * HEAD_DIM + dim[None, :]
    token = (first_token + row - num_front).to(tl.int64)
    own = tl.load(qkv_ptr + token * qkv_stride + place, mask=inside & is_own, other=0.0)

    key = first_key + row
    block = tl.load(table_ptr + table_at + key // BLOCK_SIZE, mask=is_front, other=0).to(tl.int64)
    start = block * block_stride + (key % BLOCK_SIZE) * HEAD_DIM
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    k_place = start + (head - NUM_HEADS)[:, None] * (BLOCK_SIZE * HEAD_DIM) + dim[None, :]
    v_place = start + (head - NUM_HEADS - NUM_KV_HEADS)[:, None] * (BLOCK_SIZE * HEAD_DIM) + dim[None, :]
    k = tl.load(k_ptr + k_place, mask=inside & is_front & is_key[:, None], other=0.0)
    v = tl.load(v_ptr + v_place, mask=inside & is_front & is_value[:, None], other=0.0)
    cached = tl.where(is_key[:, None], k, v)
    target = staged_ptr + row.to(tl.int64) * (NUM_ALL * HEAD_DIM) + place
    tl.store(target, tl.where(is_own, own, cached), mask=inside)


@triton.jit(do_not_specialize=["first_key", "table_at"])
def _gather_kernel(
    piece_ptr, k_ptr, v_ptr, table_ptr, block_stride, num_keys, first_key, table_at, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_head = tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    is_key = index < num_keys
    inside = is_key[:, None] & (dim < HEAD_DIM)[None, :]
    wait_for_previous(PDL)
    key = first_key + index
    block = tl.load(table_ptr + table_at + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    place = block * block_stride + (kv_head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
    source = place[:, None] + dim[None, :]
    target = piece_ptr + (kv_head.to(tl.int64) * num_keys + index)[:, None] * HEAD_DIM + dim[None, :]
    k = tl.load(k_ptr + source, mask=inside, other=0.0)
    v = tl.load(v_ptr + source, mask=inside, other=0.0)
    tl.store(target, k, mask=inside)
    tl.store(target + num_keys.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM), v, mask=inside)


@triton.jit
def _fold(part_ptr, log_sums_ptr, place, log_place, mask, is_head, top, total, acc):
    """A part beside those before it, whose sums are in units of exp(top)."""
    log_sum = tl.load(log_sums_ptr + log_place, mask=is_head, other=0.0)
    part = tl.load(part_ptr + place, mask=mask, other=0.0).to(tl.float32)
    new_top = tl.maximum(top, log_sum)
    shrink, weight = tl.exp(top - new_top), tl.exp(log_sum - new_top)
    return new_top, total * shrink + weight, acc * shrink[:, None] + part * weight[:, None]


@triton.jit(
    do_not_specialize=[
        "num_parts", "has_carry", "num_skipped", "first_log_stride", "log_stride", "num_rows", "first_token"
    ]
)  # fmt: skip
def _merge_kernel(
    part0, part1, part2, part3, log0, log1, log2, log3, carry_ptr, carry_log_ptr, out_ptr, out_stride,
    num_parts, has_carry, num_skipped, first_log_stride, log_stride, num_rows, first_token,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    IS_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_D)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    inner = head[:, None] * HEAD_DIM + dim[None, :]
    place = row * (NUM_HEADS * HEAD_DIM) + inner
    first_place = (row + num_skipped) * (NUM_HEADS * HEAD_DIM) + inner
    first_log_place = head * first_log_stride + row + num_skipped
    log_place = head * log_stride + row
    carry_log_place = head * num_rows + row
    top = tl.full([HEADS], -1.0e30, tl.float32)
    total = tl.full([HEADS], 0.0, tl.float32)
    acc = tl.full([HEADS, BLOCK_D], 0.0, tl.float32)
    wait_for_previous(PDL)
    if has_carry != 0:
        top, total, acc = _fold(
            carry_ptr, carry_log_ptr, place, carry_log_place, mask, is_head, top, total, acc
        )
    top, total, acc = _fold(part0, log0, first_place, first_log_place, mask, is_head, top, total, acc)
    if num_parts > 1:
        top, total, acc = _fold(part1, log1, place, log_place, mask, is_head, top, total, acc)
    if num_parts > 2:
        top, total, acc = _fold(part2, log2, place, log_place, mask, is_head, top, total, acc)
    if num_parts > 3:
        top, total, acc = _fold(part3, log3, place, log_place, mask, is_head, top, total, acc)
    result = acc / total[:, None]
    if IS_LAST:
        target = out_ptr + (first_token + row) * out_stride + inner
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(carry_ptr + place, result, mask=mask)
        tl.store(carry_log_ptr + carry_log_place, top + tl.log(total), mask=is_head)
