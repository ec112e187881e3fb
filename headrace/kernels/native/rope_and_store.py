"""rope_and_store; see kernels/reference/rope_and_store.py."""

from __future__ import annotations

import torch

from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.run import check_rows
from headrace.kernels.native.structs import CACHE_TYPES, DTYPES, Cache, RopeAndStoreArgs
from headrace.kernels.quantized_cache import QuantizedCache


@native_op(lambda qkv, *_, **__: 3 * qkv.numel())
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
) -> RopeAndStoreArgs:
    """See the reference; a negative slot is none."""
    check_rows(qkv=qkv, cos_sin=cos_sin)
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32 and cos_sin.shape[1] == head_dim
    for index in (positions, slot_mapping):
        assert index.is_contiguous() and index.dtype == torch.int64
    for norm in (q_norm, k_norm):
        assert norm is None or (norm.is_contiguous() and norm.dtype == torch.float32)
    return RopeAndStoreArgs(
        rows=len(positions),
        qkv=qkv.data_ptr(),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        cos_sin=cos_sin.data_ptr(),
        positions=positions.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        keys=cache_args(k_cache),
        values=cache_args(v_cache),
        qkv_stride=qkv.stride(0),
        block_size=cache_block_size(k_cache),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=eps,
        dtype=DTYPES[qkv.dtype],
    )


def cache_args(cache: torch.Tensor | QuantizedCache) -> Cache:
    """Where one layer's keys or values [num_blocks, K, B, D] are."""
    codes = cache.codes if isinstance(cache, QuantizedCache) else cache
    check_rows(cache=codes)
    block, head, token, _ = codes.stride()
    args = Cache(data=codes.data_ptr(), block_stride=block, head_stride=head, token_stride=token)
    if not isinstance(cache, QuantizedCache):
        args.type = DTYPES[cache.dtype]
        return args
    check_rows(words=cache.words)
    args.words = cache.words.data_ptr()
    args.words_block_stride, args.words_head_stride, _ = cache.words.stride()
    args.type, args.is_turned = CACHE_TYPES[cache.format.name], int(cache.is_turned)
    return args


def cache_block_size(cache: torch.Tensor | QuantizedCache) -> int:
    """Tokens of a block."""
    return cache.block_size if isinstance(cache, QuantizedCache) else cache.shape[2]
