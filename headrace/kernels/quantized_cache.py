"""QuantizedCache: keys or values of one layer in 8 or 4 bits, with a scale for each token and head.

The scale of a token's head is 4 bytes of the block: fp32 for int8 and fp8, whose codes are value / scale; for int4 two
fp16 numbers, scale and minimum, since 16 levels are too few to waste any on numbers that do not occur: value =
scale * code + minimum, elements i and i + D/2 in one byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How numbers are stored.

    Attributes:
        name: the setting's spelling.
        code_dtype: of codes in memory.
        codes_per_byte: 2 for int4.
        largest: the code of a head's largest number; for e5m2 well below what it can hold, so that scales stay in
            the range of fp16.
    """

    name: str
    code_dtype: torch.dtype
    codes_per_byte: int
    largest: float

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of one token's codes of one head."""
        return head_dim // self.codes_per_byte

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """values [..., D] of any float type -> (codes [..., code bytes], scale words [...] fp32)."""
        wide = values.float()
        if self.codes_per_byte == 2:
            return _encode_int4(wide)
        most = wide.abs().amax(-1)
        scale = most / self.largest
        inverse = torch.where(most > 0, torch.full_like(most, self.largest) / most, 0.0)
        scaled = wide * inverse.unsqueeze(-1)
        if self.code_dtype == torch.int8:
            scaled.round_()
        return scaled.clamp_(-self.largest, self.largest).to(self.code_dtype), scale

    def decode(self, codes: Tensor, words: Tensor) -> Tensor:
        """codes [..., code bytes] and scale words [...] fp32 -> [..., D] fp32."""
        if self.codes_per_byte == 1:
            return codes.float() * words.unsqueeze(-1)
        scale, minimum = words.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float().unbind(-1)
        numbers = torch.cat((codes & 15, codes >> 4), dim=-1).float()
        return numbers * scale.unsqueeze(-1) + minimum.unsqueeze(-1)


KV_FORMATS = {
    "int8": KVFormat("int8", torch.int8, 1, 127.0),
    "fp8_e4m3": KVFormat("fp8_e4m3", torch.float8_e4m3fn, 1, 448.0),
    "fp8_e5m2": KVFormat("fp8_e5m2", torch.float8_e5m2, 1, 1792.0),
    "int4": KVFormat("int4", torch.uint8, 2, 15.0),
}
"""{``kv_cache_dtype``: format}."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedCache:
    """What ``rope_and_store`` and ``attention`` take in place of a dense cache [num_blocks, K, B, D].

    Attributes:
        codes: [num_blocks, K, B, code bytes] of the format's type, strided over blocks and heads.
        words: [num_blocks, K, B] fp32, strided alike.
        head_dim: D.
    """

    format: KVFormat
    codes: Tensor
    words: Tensor
    head_dim: int

    @property
    def block_size(self) -> int:
        """B."""
        return self.codes.shape[2]

    def store(self, values: Tensor, block: Tensor, place: Tensor) -> None:
        """values [T, K, D] into slots (block, place) [T] int64 each."""
        codes, words = self.format.encode(values)
        raw = self.codes.view(torch.uint8)
        raw.transpose(1, 2).index_put_((block, place), codes.view(torch.uint8))
        self.words.transpose(1, 2).index_put_((block, place), words)

    def decode_blocks(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Those blocks [n] int64 as a dense cache [n, K, B, D]."""
        codes = self.codes.view(torch.uint8)[blocks].view(self.format.code_dtype)
        return self.format.decode(codes, self.words[blocks]).to(dtype)


def _encode_int4(wide: Tensor) -> tuple[Tensor, Tensor]:
    low, high = wide.aminmax(dim=-1)
    minimum = low.half()
    # from the rounded minimum, so that its error does not add to the codes'
    scale = ((high - minimum.float()).clamp_min(0.0) / 15.0).half()
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0).unsqueeze(-1)
    codes = ((wide - minimum.float().unsqueeze(-1)) * inverse).round_().clamp_(0, 15).to(torch.uint8)
    first, second = codes.chunk(2, dim=-1)
    words = torch.stack((scale, minimum), dim=-1).view(torch.float32).squeeze(-1)
    return first | (second << 4), words
