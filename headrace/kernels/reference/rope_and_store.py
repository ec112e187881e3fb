"""rope_and_store in plain torch: query and key norms, rotary embedding, K and V into the cache."""

from __future__ import annotations

import torch

from headrace.kernels.reference.norm import rms_norm


def rope_and_store(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Per head: optional RMSNorm of q and k, then rotation of q and k in place; k and v go into their slots.

    The rotation is the half-split one (GPT-NeoX, Su et al.'s RoPE): (a, b) -> (a cos - b sin, b cos + a sin) for the
    two halves of a head.

    Args:
        qkv: [T, (H+2K)*D], queries, keys, values; q and k are changed.
        q_norm, k_norm: [D] or None.
        cos_sin: [P, D] fp32, cosines of position p in the first half of row p, sines in the second.
        positions: [T] int64.
        slot_mapping: [T] int64; slot = block id * B + offset.
        k_cache, v_cache: [num_blocks, K, B, D], strided over blocks.
    """
    num_tokens, half = qkv.shape[0], head_dim // 2
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    if q_norm is not None and k_norm is not None:
        q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        rms_norm(q, q_norm, eps, q)
        rms_norm(k, k_norm, eps, k)
    angles = cos_sin.index_select(0, positions).unsqueeze(1)
    cos, sin = angles[..., :half], angles[..., half:]
    rotated = heads[:, : num_heads + num_kv_heads]
    wide = rotated.float() if rotated.dtype != torch.float32 else rotated
    first, second = wide[..., :half], wide[..., half:]
    turned = first * cos - second * sin
    rotated[..., half:] = second * cos + first * sin
    rotated[..., :half] = turned
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache.permute(0, 2, 1, 3)[block, offset] = heads[:, num_heads : num_heads + num_kv_heads].to(
        k_cache.dtype
    )
    v_cache.permute(0, 2, 1, 3)[block, offset] = heads[:, num_heads + num_kv_heads :].to(v_cache.dtype)
