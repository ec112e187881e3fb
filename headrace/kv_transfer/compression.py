"""BlockCompression: blocks rounded to few bits on their way to a cache tier, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.quantized_cache import KV_FORMATS, SCALE_BYTES, KVFormat, hadamard


class DenseLayout(Protocol):
    """What must be known of a dense block [num_layers, 2 (K then V), num_kv_heads, block_size, head_dim]."""

    @property
    def num_layers(self) -> int:
        """Layers in a block."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def head_dim(self) -> int:
        """Numbers of one token's key of one head."""


@dataclass(frozen=True, slots=True)
class BlockCompression:
    """Dense blocks as codes with a scale for each token and head, in the formats of a quantized KV cache.

    What is lost is lost for good: a block that comes back is read by its request as it is.

    Args:
        name: "int8" or "int4".
        layout: of the device's blocks.
        dtype: of the numbers in them.
    """

    name: str
    layout: DenseLayout
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of a compressed block."""
        formats = KV_FORMATS[self.name]
        sizes = [
            form.code_bytes(self.layout.head_dim) + SCALE_BYTES for form in (formats.keys, formats.values)
        ]
        return self._num_tokens * sum(sizes)

    def compress(self, block: Tensor) -> Tensor:
        """block [bytes] uint8 -> [num_bytes] uint8 on the same device."""
        formats = KV_FORMATS[self.name]
        keys, values = block.view(self.dtype).view(self._shape).float().unbind(1)
        keys = hadamard(keys) if formats.turns_keys else keys
        return torch.cat([*_encoded(formats.keys, keys), *_encoded(formats.values, values)])

    def restore(self, compressed: Tensor) -> Tensor:
        """The inverse, but for the rounding."""
        formats, size = KV_FORMATS[self.name], self.layout.head_dim
        split = self._num_tokens * (formats.keys.code_bytes(size) + SCALE_BYTES)
        keys = self._decoded(formats.keys, compressed[:split])
        values = self._decoded(formats.values, compressed[split:])
        keys = hadamard(keys) if formats.turns_keys else keys
        return torch.stack((keys, values), dim=1).to(self.dtype).flatten().view(torch.uint8)

    @property
    def _shape(self) -> tuple[int, ...]:
        layout = self.layout
        return (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)

    @property
    def _num_tokens(self) -> int:
        """Keys of one head in a block; as many values."""
        return self.layout.num_layers * self.layout.num_kv_heads * self.layout.block_size

    def _decoded(self, form: KVFormat, part: Tensor) -> Tensor:
        """[num_layers, num_kv_heads, block_size, head_dim] fp32."""
        codes = part[: self._num_tokens * form.code_bytes(self.layout.head_dim)].view(form.code_dtype)
        words = part[len(codes) :].clone().view(torch.float32)  # a part may begin anywhere
        numbers = form.decode(codes.view(self._num_tokens, -1), words)
        return numbers.view(self._shape[0], *self._shape[2:])


def _encoded(form: KVFormat, numbers: Tensor) -> tuple[Tensor, Tensor]:
    codes, words = form.encode(numbers)
    return codes.view(torch.uint8).flatten(), words.flatten().view(torch.uint8)
