"""rope_and_store: query and key norms, rotary embedding, K and V into the cache, in one pass.

Legend: T tokens, H query heads, K KV heads, D head dim, B block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.quantized_cache import QuantizedCache
from headrace.kernels.triton.launch import launch_options, let_next_start, wait_for_previous
from headrace.kernels.triton.quantized_cache import cache_arguments, hadamard_halves, store_quantized

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
    k_codes, k_scales, k_kind, k_largest = cache_arguments(k_cache)
    v_codes, v_scales, v_kind, v_largest = cache_arguments(v_cache)
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
        v_codes.stride(1),
        k_scales.stride(0),
        k_scales.stride(1),
        v_scales.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=k_codes.shape[2],
        HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM,
        HAS_NORM=has_norm,
        K_TOKEN=k_codes.shape[3],
        V_TOKEN=v_codes.shape[3],
        K_KIND=k_kind,
        V_KIND=v_kind,
        K_LARGEST=k_largest,
        V_LARGEST=v_largest,
        IS_TURNED=isinstance(k_cache, QuantizedCache) and k_cache.is_turned,
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


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_and_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, cos_sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr,
    k_scales_ptr, v_scales_ptr, qkv_stride, block_stride, k_head_stride, v_head_stride, scales_block_stride,
    k_scales_stride, v_scales_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, HAS_NORM: tl.constexpr,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_LARGEST: tl.constexpr, V_LARGEST: tl.constexpr, IS_TURNED: tl.constexpr, PDL: tl.constexpr,
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
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if IS_TURNED:
        turned_first, turned_second = hadamard_halves(turned_first, turned_second, HALF)
    turned_first = turned_first.to(dtype)
    turned_second = turned_second.to(dtype)
    rotated = inside & is_rotated[:, None]
    tl.store(place, turned_first, mask=rotated)
    tl.store(place + HALF, turned_second, mask=rotated)

    # in the cache: keys of heads [H, H+K), values of heads [H+K, H+2K)
    kv_head = tl.where(is_rotated, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    wide_head = kv_head.to(tl.int64)
    k_place = block * block_stride + place * K_TOKEN + wide_head * k_head_stride
    v_place = block * block_stride + place * V_TOKEN + wide_head * v_head_stride
    if K_KIND != "":
        head_first = tl.where(is_rotated[:, None], turned_first, first_raw).to(tl.float32)
        head_second = tl.where(is_rotated[:, None], turned_second, second_raw).to(tl.float32)
        is_kv = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (slot >= 0)
        k_scale = _scale_place(block, place, wide_head, scales_block_stride, k_scales_stride, K_KIND)
        v_scale = _scale_place(block, place, wide_head, scales_block_stride, v_scales_stride, V_KIND)
        store_quantized(
            head_first, head_second, k_cache_ptr, k_scales_ptr, k_place, k_scale,
            is_kv & is_rotated & (~is_query), in_half, K_KIND, K_LARGEST, HALF,
        )  # fmt: skip
        store_quantized(
            head_first, head_second, v_cache_ptr, v_scales_ptr, v_place, v_scale,
            is_kv & (~is_rotated), in_half, V_KIND, V_LARGEST, HALF,
        )  # fmt: skip
        return
    is_key = inside & (slot >= 0) & (is_rotated & ~is_query)[:, None]
    is_value = inside & (slot >= 0) & (~is_rotated)[:, None]
    _store_halves(k_cache_ptr + k_place[:, None] + dim[None, :], turned_first, turned_second, is_key, HALF)
    _store_halves(v_cache_ptr + v_place[:, None] + dim[None, :], first_raw, second_raw, is_value, HALF)


@triton.jit
def _scale_place(block, place, head, block_stride, head_stride, KIND: tl.constexpr):
    """Where a slot's scale is; pairs of fp16 are counted as one, strides count fp16."""
    before = block * block_stride + head * head_stride
    if (KIND == "int4") | (KIND == "int5"):
        before = before // 2
    return before + place
