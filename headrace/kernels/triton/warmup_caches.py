"""Small caches to compile with, laid out as the model's are: strides and alignments count."""

from __future__ import annotations

import torch

from headrace.kernels.quantized_cache import SCALE_BYTES, KVFormats, QuantizedCache

_NUM_BLOCKS = 2

Cache = torch.Tensor | QuantizedCache


def small_caches(
    kv_type: torch.dtype | KVFormats, num_kv_heads: int, block_size: int, head_dim: int, device: torch.device
) -> tuple[Cache, Cache]:
    """Zeros of one layer's keys and values, two blocks each."""
    if isinstance(kv_type, torch.dtype):
        shape = (_NUM_BLOCKS, 2, num_kv_heads, block_size, head_dim)
        layer = torch.zeros(shape, dtype=kv_type, device=device)
        return layer[:, 0], layer[:, 1]
    formats = (kv_type.keys, kv_type.values)
    sizes = [block_size * form.code_bytes(head_dim) for form in formats]
    code_bytes = [-(-size // SCALE_BYTES) * SCALE_BYTES for size in sizes]
    parts = [num_kv_heads * (size + block_size * SCALE_BYTES) for size in code_bytes]
    blocks = torch.zeros((_NUM_BLOCKS, sum(parts)), dtype=torch.uint8, device=device)
    made = []
    for part, (form, size, start) in enumerate(zip(formats, sizes, code_bytes, strict=True)):
        planes = blocks.split(parts, dim=1)[part].unflatten(1, (num_kv_heads, -1))
        codes = planes[..., :size].unflatten(-1, (block_size, -1)).view(form.code_dtype)
        words = planes[..., start:].view(torch.float32)
        made.append(QuantizedCache(form, codes, words, head_dim, kv_type.turns_keys and part == 0))
    return made[0], made[1]
