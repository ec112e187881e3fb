"""rope_and_store in plain torch: query and key norms, rotary embedding, K and V into the cache."""

from __future__ import annotations

import torch

from headrace.kernels.quantized_cache import QuantizedCache, hadamard
from headrace.kernels.reference.norm import inverse_rms

Cache = torch.Tensor | QuantizedCache


def rope_and_store(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Per head: optional RMSNorm of q and k, then rotation of q and k in place; k and v go into their slots.

    The rotation is the half-split one (GPT-NeoX, Su et al.'s RoPE): (a, b) -> (a cos - b sin, b cos + a sin) for the
    two halves of a head. Norms and rotation are computed in fp32 and rounded once. Where the cache stores turned keys,
    q and k are ``hadamard``-transformed besides, which leaves q.k as it is.

    Args:
        qkv: [T, (H+2K)*D], queries, keys, values; q and k are changed.
        q_norm, k_norm: [D] fp32, or both None.
        cos_sin: [P, D] fp32, cosines of position p in the first half of row p, sines in the second.
        positions: [T] int64.
        slot_mapping: [T] int64; slot = block id * B + offset; -1: the token is stored nowhere (padding).
        k_cache, v_cache: [num_blocks, K, B, D] of any float type, strided over blocks; B is a power of two.
            Or a ``QuantizedCache`` each.
    """
    num_rotated, half = num_heads + num_kv_heads, head_dim // 2
    heads = qkv.view(-1, num_rotated + num_kv_heads, head_dim)
    rotated = heads[:, :num_rotated]
    wide = rotated.float()
    if q_norm is not None and k_norm is not None:
        wide = wide * inverse_rms(wide, eps)
        wide[:, :num_heads].mul_(q_norm)
        wide[:, num_heads:].mul_(k_norm)
    _rotate(wide.view(-1, num_rotated, 2, half), cos_sin.index_select(0, positions).view(-1, 1, 2, half))
    if isinstance(k_cache, QuantizedCache) and k_cache.is_turned:
        wide.copy_(hadamard(wide))
    if wide is not rotated:
        rotated.copy_(wide)
    _store(heads[:, num_heads:], slot_mapping, k_cache, v_cache)


def _rotate(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """heads: [T, N, 2, D/2] fp32, in place; cos_sin: [T, 1, 2, D/2]."""
    first, second = heads.unbind(2)
    cos, sin = cos_sin.unbind(2)
    first_sin = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1.0)
    second.mul_(cos).add_(first_sin)


def _store(keys_values: torch.Tensor, slot_mapping: torch.Tensor, k_cache: Cache, v_cache: Cache) -> None:
    """keys_values: [T, 2K, D]."""
    if isinstance(k_cache, QuantizedCache) and isinstance(v_cache, QuantizedCache):
        shift = k_cache.block_size.bit_length() - 1
        block, place = slot_mapping >> shift, slot_mapping & (k_cache.block_size - 1)
        for cache, part in zip((k_cache, v_cache), keys_values.chunk(2, dim=1), strict=True):
            cache.store(part, block, place)
        return
    assert isinstance(k_cache, torch.Tensor) and isinstance(v_cache, torch.Tensor)
    if len(slot_mapping) and int(slot_mapping.min()) < 0:
        is_stored = slot_mapping >= 0
        keys_values, slot_mapping = keys_values[is_stored], slot_mapping[is_stored]
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    block, place = slot_mapping >> (block_size.bit_length() - 1), slot_mapping & (block_size - 1)
    keys_values = keys_values.to(k_cache.dtype)
    plane_size = block_size * head_dim
    if v_cache.data_ptr() - k_cache.data_ptr() == num_kv_heads * plane_size * k_cache.element_size():
        # V's planes follow K's, as in a KVCacheLayout: one scatter, which halves the time of a small step.
        strides = (k_cache.stride(0), head_dim, plane_size, 1)
        both = torch.as_strided(k_cache, (num_blocks, block_size, 2 * num_kv_heads, head_dim), strides)
        both.index_put_((block, place), keys_values)
    else:
        keys, values = keys_values.split(num_kv_heads, dim=1)
        k_cache.transpose(1, 2).index_put_((block, place), keys)
        v_cache.transpose(1, 2).index_put_((block, place), values)
