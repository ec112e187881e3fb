"""KVCache: the device memory of all KV blocks, and KVCacheLayout: what the bytes of one block mean.

One block, over all layers of its group, is one contiguous byte range:

    [num_layers, 2 (K then V), num_kv_heads, block_size, head_dim]

Quantized, each plane [block_size, code bytes] is followed by the scales of its tokens, [block_size] words of 4 bytes;
planes of keys may be larger than those of values.

Copies, tiers and transfers move byte ranges; kernels take typed strided views of one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.kv_cache_spec import KVCacheSpec, group_layers
from headrace.errors import ConfigError
from headrace.kernels.quantized_cache import KV_FORMATS, SCALE_BYTES, KVFormat, KVFormats, QuantizedCache
from headrace.kernels.reference.copy_blocks import copy_blocks as reference_copy_blocks
from headrace.kernels.reference.copy_blocks import copy_tokens
from headrace.runtime.early_pages import EarlyPages


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The bytes of one block.

    num_layers: layers in one group, padding layers counted.
    num_kv_heads, head_dim: of one rank's attention layers, K and V alike.
    block_size: tokens in a block.
    dtype: of the stored keys and values, or the formats of quantized ones.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype | KVFormats

    @classmethod
    def for_specs(
        cls,
        specs: Sequence[KVCacheSpec],
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype | KVFormats,
    ) -> KVCacheLayout:
        """The layout of the blocks of ``specs``, which ``kv_cache_specs_for`` made from the same arguments."""
        return cls(len(specs[0].layer_ids), num_kv_heads, block_size, head_dim, dtype)

    @property
    def formats(self) -> tuple[KVFormat, KVFormat] | None:
        """Those of keys and of values; None where they are not quantized."""
        return (self.dtype.keys, self.dtype.values) if isinstance(self.dtype, KVFormats) else None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane of a dense cache: one head's key, or one head's value."""
        assert isinstance(self.dtype, torch.dtype)
        return self.head_dim * self.dtype.itemsize

    def code_bytes(self, kv_format: KVFormat) -> int:
        """Bytes of a quantized plane before its scales, which begin at a multiple of their size."""
        size = self.block_size * kv_format.code_bytes(self.head_dim)
        return -(-size // SCALE_BYTES) * SCALE_BYTES

    @property
    def plane_bytes(self) -> tuple[int, int]:
        """Bytes of a plane of keys, and of one of values; scales included."""
        if self.formats is None:
            return (self.block_size * self.token_bytes,) * 2
        keys, values = (self.code_bytes(each) + self.block_size * SCALE_BYTES for each in self.formats)
        return keys, values

    @property
    def num_planes(self) -> int:
        """Planes [block_size, head_dim] in a block: layers x 2 x KV heads."""
        return self.num_layers * 2 * self.num_kv_heads

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of its group."""
        return self.num_layers * self.num_kv_heads * sum(self.plane_bytes)


class KVCache:
    """All KV blocks of one device: one uint8 tensor [num_blocks, bytes_per_block], shared by all groups.

    Fresh memory is not cleared: a slot has no meaning before its token is stored, and readers must not depend on it.

    Args:
        specs: the model's KV groups; all have the layout's ``bytes_per_block``.
        layout: what a block's bytes mean.
        num_blocks: blocks to hold.
        device: where.
        copy_op: the device's ``copy_blocks`` op.

    Raises:
        ConfigError: a group does not fit the layout, or the blocks do not fit into memory.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        layout: KVCacheLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        copy_op: Callable[..., Any] = reference_copy_blocks,
    ) -> None:
        for spec in specs:
            if len(spec.layer_ids) != layout.num_layers or spec.bytes_per_block != layout.bytes_per_block:
                raise ConfigError(
                    f"KV group of layers {spec.layer_ids} with {spec.bytes_per_block} bytes a block does not fit "
                    f"a layout of {layout.num_layers} layers and {layout.bytes_per_block} bytes; "
                    "build both from one model"
                )
        self.specs = tuple(specs)
        self.layout = layout
        self.num_blocks = num_blocks
        self.blocks = _allocate(num_blocks, layout.bytes_per_block, device)
        self.early_pages = EarlyPages(self.blocks) if self.blocks.device.type == "cpu" else None
        self._copy_op = copy_op
        self._places = {
            layer: (group, index)
            for group, spec in enumerate(specs)
            for index, layer in enumerate(spec.layer_ids)
            if layer >= 0
        }

    def layer_group(self, layer_id: int) -> int:
        """Index of the KV group that holds a model layer: which ``ForwardBatch.groups`` entry the layer reads."""
        return self._places[layer_id][0]

    def layer_views(self, layer_id: int) -> tuple[Any, Any]:
        """Views (k, v) of one layer, each [num_blocks, num_kv_heads, block_size, head_dim], strided over blocks; a
        ``QuantizedCache`` each where the cache is quantized."""
        layout = self.layout
        _, index = self._places[layer_id]
        if isinstance(layout.dtype, KVFormats):
            return self._quantized_view(index, 0), self._quantized_view(index, 1)
        shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        layer = self.blocks.view(layout.dtype).view(self.num_blocks, *shape)[:, index]
        return layer[:, 0], layer[:, 1]

    def _quantized_view(self, index: int, part: int) -> QuantizedCache:
        """Keys (part 0) or values (1) of the group's ``index``-th layer."""
        layout = self.layout
        assert isinstance(layout.dtype, KVFormats) and layout.formats is not None
        codes, words = quantized_parts(self.blocks, layout, part)
        kv_format = layout.formats[part]
        return QuantizedCache(
            kv_format,
            codes[:, index].view(kv_format.code_dtype),
            words[:, index].view(torch.float32).squeeze(-1),
            layout.head_dim,
            is_turned=part == 0 and layout.dtype.turns_keys,
        )

    def block_bytes(self, block_id: int) -> torch.Tensor:
        """View [bytes_per_block] uint8 of one block, all layers: what tiers and transfers move."""
        return self.blocks[block_id]

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Copy the first ``num_tokens[c]`` tokens of block ``src[c]`` to block ``dst[c]``, all layers.

        Args:
            src, dst, num_tokens: [C] int64 on the cache's device. No block is both a source and a destination.
        """
        if self.layout.formats is None:
            self._copy_op(self.blocks, src, dst, num_tokens, self.layout)
            return
        parts = [quantized_parts(self.blocks, self.layout, part) for part in (0, 1)]
        copy_tokens([*parts[0], *parts[1]], src, dst, num_tokens)


def quantized_parts(
    blocks: torch.Tensor, layout: KVCacheLayout, part: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [num_blocks, layers, KV heads, block_size, code bytes] and scales [..., block_size, 4] of the keys (part 0)
    or the values (1) of blocks [num_blocks, bytes_per_block], all uint8."""
    assert layout.formats is not None
    size, heads, plane_bytes = layout.block_size, layout.num_kv_heads, layout.plane_bytes
    layers = blocks.unflatten(1, (layout.num_layers, -1))
    first = part * heads * plane_bytes[0]
    planes = layers[..., first : first + heads * plane_bytes[part]].unflatten(-1, (heads, -1))
    form = layout.formats[part]
    codes = planes[..., : size * form.code_bytes(layout.head_dim)].unflatten(-1, (size, -1))
    return codes, planes[..., layout.code_bytes(form) :].unflatten(-1, (size, SCALE_BYTES))


def _allocate(num_blocks: int, bytes_per_block: int, device: torch.device | str) -> torch.Tensor:
    num_bytes = num_blocks * bytes_per_block
    try:
        return torch.empty((num_blocks, bytes_per_block), dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"no memory for {num_blocks} KV blocks of {bytes_per_block} bytes, {num_bytes} bytes in all; lower "
            "num_kv_blocks or kv_cache_bytes"
        ) from error


def kv_cache_specs_for(
    layer_windows: Sequence[int | None],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype | KVFormats,
    held_layers: range | None = None,
) -> list[KVCacheSpec]:
    """The KV groups of a model: layers of one window together, groups of equal size.

    All stages of a pipeline have the same groups, since they share block tables; each stage's hold its own layers.

    Args:
        layer_windows: per layer its sliding window in tokens, or None for full attention.
        num_kv_heads, head_dim: of one rank's attention layers.
        block_size: tokens in a block.
        dtype: of the stored keys and values, or the format of quantized ones.
        held_layers: those of this stage; None: all.
    """
    groups = group_layers(tuple(layer_windows))
    if held_layers is not None and len(held_layers) < len(layer_windows):
        groups = _regroup(groups, layer_windows, held_layers)
    layout = KVCacheLayout(len(groups[0][1]), num_kv_heads, block_size, head_dim, dtype)
    return [
        KVCacheSpec(
            kind="full" if window is None else "sliding",
            layer_ids=layer_ids,
            bytes_per_block=layout.bytes_per_block,
            window=window,
        )
        for window, layer_ids in groups
    ]


def _regroup(
    groups: list[tuple[int | None, tuple[int, ...]]], layer_windows: Sequence[int | None], held: range
) -> list[tuple[int | None, tuple[int, ...]]]:
    """As many groups of each window, holding a stage's layers as evenly as they go."""
    num_groups = Counter(window for window, _ in groups)
    layers = {window: [layer for layer in held if layer_windows[layer] == window] for window in num_groups}
    size = max(-(-len(layers[window]) // count) for window, count in num_groups.items())
    regrouped: list[tuple[int | None, tuple[int, ...]]] = []
    for window, count in num_groups.items():
        for index in range(count):
            chunk = layers[window][index * size : (index + 1) * size]
            regrouped.append((window, tuple(chunk + [-1] * (size - len(chunk)))))
    return regrouped


def stored_kv_type(
    name: str, compute_dtype: torch.dtype, head_dim: int, setting: str = "kv_cache_dtype"
) -> torch.dtype | KVFormats:
    """What the setting ``kv_cache_dtype``, or another of its kind, comes to.

    Raises:
        ConfigError: int4 for heads of a size that does not fill bytes.
    """
    if name == "auto":
        return compute_dtype
    if name not in KV_FORMATS:
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    found = KV_FORMATS[name]
    if head_dim % found.head_multiple:
        raise ConfigError(
            f"{setting} {name!r} needs a head size that is a multiple of {found.head_multiple}, but it is "
            f"{head_dim}; choose int8"
        )
    return found
