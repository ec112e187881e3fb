"""rope_and_store: query and key norms, rotary embedding, K and V into the cache, in one pass.

Legend: T tokens, H query heads, K KV heads, D head dim, B block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.quantized_cache import QuantizedCache
from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous
from headrace.kernels.triton.quantized_cache import cache_arguments, store_quantized

_HEADS_PER_PROGRAM = 8


def rope_and_store(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor | QuantizedCache,
    v_cache: torch.Tensor | QuantizedCache,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """See ``headrace.kernels.reference.rope_and_store.rope_and_store``.

    A token whose slot is negative is padding: its K and V are stored nowhere.
    """
    num_tokens = qkv.shape[0]
    if num_tokens == 0:
        return
    has_norm = q_norm is not None and k_norm is not None
    num_all = num_heads + 2 * num_kv_heads
    k_codes, k_scales, kind, largest = cache_arguments(k_cache)
    v_codes, v_scales, _, _ = cache_arguments(v_cache)
    _rope_and_store_kernel[(num_tokens, triton.cdiv(num_all, _HEADS_PER_PROGRAM))](
        qkv,
        q_norm if has_norm else cos_sin,
        k_norm if has_norm else cos_sin,
        eps,
        cos_sin,
        positions,
        slot_mapping,
        k_codes,
        v_codes,
        k_scales,
        v_scales,
        qkv.stride(0),
        k_codes.stride(0),
        k_codes.stride(1),
        k_codes.stride(2),
        k_scales.stride(0),
        k_scales.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=k_codes.shape[2],
        HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM,
        HAS_NORM=has_norm,
        KIND=kind,
        LARGEST=largest,
        num_warps=2,
        **launch_options(),
    )


@triton.jit
def _normed(first, second, is_query, q_norm_ptr, k_norm_ptr, dim, in_half, eps, HEAD_DIM: tl.constexpr):
    """The halves [heads, D/2] of query and key heads after their norms."""
    HALF: tl.constexpr = HEAD_DIM // 2
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
    q_first = tl.load(q_norm_ptr + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
    q_second = tl.load(q_norm_ptr + HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
    k_first = tl.load(k_norm_ptr + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
    k_second = tl.load(k_norm_ptr + HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first = first * scale * tl.where(is_query[:, None], q_first, k_first)
    return first, second * scale * tl.where(is_query[:, None], q_second, k_second)


@triton.jit
def _store_halves(target, first, second, mask, HALF: tl.constexpr):
    dtype = target.dtype.element_ty
    tl.store(target, first.to(dtype), mask=mask)
    tl.store(target + HALF, second.to(dtype), mask=mask)


@triton.jit
def _rope_and_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, cos_sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr,
    k_scales_ptr, v_scales_ptr, qkv_stride, block_stride, head_stride, slot_stride, scales_block_stride,
    scales_head_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    HAS_NORM: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HALF_BLOCK)
    in_half = dim < HALF
    is_query = head < NUM_HEADS
    is_rotated = head < NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    wait_for_previous(PDL)

    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + dim, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + dim, mask=in_half, other=0.0)[None, :]
    place = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM + dim[None, :]
    first_raw = tl.load(place, mask=inside, other=0.0)
    second_raw = tl.load(place + HALF, mask=inside, other=0.0)
    first = first_raw.to(tl.float32)
    second = second_raw.to(tl.float32)
    if HAS_NORM:
        first, second = _normed(first, second, is_query, q_norm_ptr, k_norm_ptr, dim, in_half, eps, HEAD_DIM)
    dtype = qkv_ptr.dtype.element_ty
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    rotated = inside & is_rotated[:, None]
    tl.store(place, turned_first, mask=rotated)
    tl.store(place + HALF, turned_second, mask=rotated)

    # in the cache: keys of heads [H, H+K), values of heads [H+K, H+2K)
    kv_head = tl.where(is_rotated, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    offset = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    if KIND != "":
        head_first = tl.where(is_rotated[:, None], turned_first, first_raw).to(tl.float32)
        head_second = tl.where(is_rotated[:, None], turned_second, second_raw).to(tl.float32)
        code_place = offset + kv_head.to(tl.int64) * head_stride
        slot_place = (slot // BLOCK_SIZE) * scales_block_stride + kv_head.to(tl.int64) * scales_head_stride
        if KIND == "int4":  # scales are pairs of fp16: strides count those, places count pairs
            slot_place = slot_place // 2
        slot_place += slot % BLOCK_SIZE
        is_kv = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (slot >= 0)
        store_quantized(
            head_first, head_second, k_cache_ptr, k_scales_ptr, code_place, slot_place,
            is_kv & is_rotated & (~is_query), in_half, KIND, LARGEST, HALF,
        )  # fmt: skip
        store_quantized(
            head_first, head_second, v_cache_ptr, v_scales_ptr, code_place, slot_place,
            is_kv & (~is_rotated), in_half, KIND, LARGEST, HALF,
        )  # fmt: skip
        return
    target = offset + kv_head[:, None].to(tl.int64) * head_stride + dim[None, :]
    is_stored = inside & (slot >= 0)
    _store_halves(
        k_cache_ptr + target, turned_first, turned_second, is_stored & (is_rotated & ~is_query)[:, None], HALF
    )
    _store_halves(v_cache_ptr + target, first_raw, second_raw, is_stored & (~is_rotated)[:, None], HALF)
