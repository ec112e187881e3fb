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
    heads = qkv.view(-1, num_rotated + num_kv_heads, 2, half)
    rotated = heads.narrow(1, 0, num_rotated)
    wide = rotated.float()
    if q_norm is not None and k_norm is not None:
        wide = _normed(wide.flatten(2), q_norm, k_norm, eps, num_heads).view(wide.shape)
    turned = _rotated(wide, cos_sin.index_select(0, positions).view(-1, 1, 2, half))
    if isinstance(k_cache, QuantizedCache) and k_cache.is_turned:
        turned = hadamard(turned.flatten(2)).view(turned.shape)
    rotated.copy_(turned)
    _store(heads.narrow(1, num_heads, 2 * num_kv_heads), slot_mapping, k_cache, v_cache)


def _normed(
    heads: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, eps: float, num_heads: int
) -> torch.Tensor:
    """RMSNorm of each head [T, N, D], the first ``num_heads`` of them queries."""
    normed = heads * inverse_rms(heads, eps)
    normed[:, :num_heads].mul_(q_norm)
    normed[:, num_heads:].mul_(k_norm)
    return normed


def _rotated(heads: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """heads: [T, N, 2, D/2] fp32; cos_sin: [T, 1, 2, D/2]."""
    turned = torch.mul(heads, cos_sin.narrow(2, 0, 1))
    sin = cos_sin.select(2, 1)
    first, second = heads.unbind(2)
    turned_first, turned_second = turned.unbind(2)
    turned_first.addcmul_(second, sin, value=-1.0)
    turned_second.addcmul_(first, sin)
    return turned


def _store(keys_values: torch.Tensor, slot_mapping: torch.Tensor, k_cache: Cache, v_cache: Cache) -> None:
    """keys_values: [T, 2K, 2, D/2]."""
    if isinstance(k_cache, QuantizedCache) and isinstance(v_cache, QuantizedCache):
        shift = k_cache.block_size.bit_length() - 1
        block, place = slot_mapping >> shift, slot_mapping & (k_cache.block_size - 1)
        for cache, part in zip((k_cache, v_cache), keys_values.flatten(2).chunk(2, dim=1), strict=True):
            cache.store(part, block, place)
        return
    assert isinstance(k_cache, torch.Tensor) and isinstance(v_cache, torch.Tensor)
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    plane_size = block_size * head_dim
    # V's planes follow K's, as in a KVCacheLayout: one copy, which halves the time of a small step
    is_joint = v_cache.data_ptr() - k_cache.data_ptr() == num_kv_heads * plane_size * k_cache.element_size()
    if is_joint and len(slot_mapping) == 1:
        _store_one(keys_values, int(slot_mapping), k_cache)
        return
    keys_values = keys_values.flatten(2)
    if len(slot_mapping) and int(slot_mapping.min()) < 0:
        is_stored = slot_mapping >= 0
        keys_values, slot_mapping = keys_values[is_stored], slot_mapping[is_stored]
    block, place = slot_mapping >> (block_size.bit_length() - 1), slot_mapping & (block_size - 1)
    keys_values = keys_values.to(k_cache.dtype)
    if is_joint:
        shape = (len(k_cache), block_size, 2 * num_kv_heads, head_dim)
        both = torch.as_strided(k_cache, shape, (k_cache.stride(0), head_dim, plane_size, 1))
        both.index_put_((block, place), keys_values)
    else:
        keys, values = keys_values.split(num_kv_heads, dim=1)
        k_cache.transpose(1, 2).index_put_((block, place), keys)
        v_cache.transpose(1, 2).index_put_((block, place), values)


def _store_one(keys_values: torch.Tensor, slot: int, k_cache: torch.Tensor) -> None:
    """One token's [1, 2K, 2, D/2] into its slot, V's planes following K's; without the indices that many need."""
    if slot < 0:
        return
    block_size, head_dim = k_cache.shape[2:]
    block, place = divmod(slot, block_size)
    rows = keys_values.view(-1, head_dim)
    start = k_cache.storage_offset() + block * k_cache.stride(0) + place * head_dim
    k_cache.as_strided(rows.shape, (block_size * head_dim, 1), start).copy_(rows)
