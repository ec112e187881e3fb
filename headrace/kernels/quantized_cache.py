"""QuantizedCache: keys or values of one layer in few bits, with a scale for each token and head.

The scale of a token's head is 4 bytes of the block: fp32 for int8 and fp8, whose codes are value / scale; for 4 and 5
bits two fp16 numbers, scale and minimum, since few levels are too few to waste any on numbers that do not occur:
value = scale * code + minimum. Elements i and i + D/2 share a byte; with 5 bits, D/8 more bytes follow, each with the
fifth bits of elements 4 i .. 4 i + 3 in its lower half and of D/2 + 4 i .. D/2 + 4 i + 3 in its upper half.

``int4`` gives keys the fifth bit: an error of a key moves the weights of all values, and costs ten times as much as
one of a value. Its keys, and the queries that meet them, are turned by a Hadamard transform, which leaves their
products as they are and spreads the few large channels that keys have over all of them.
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
        name: of the format, for kernels.
        code_dtype: of codes in memory.
        bits: of a code.
        largest: the code of a head's largest number; for e5m2 well below what it can hold, so that scales stay in
            the range of fp16.
    """

    name: str
    code_dtype: torch.dtype
    bits: int
    largest: float

    @property
    def has_minimum(self) -> bool:
        """Whether a word is a scale and a minimum, and codes are packed into bytes."""
        return self.bits < 8

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of one token's codes of one head."""
        return head_dim * self.bits // 8

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """values [..., D] of any float type -> (codes [..., code bytes], scale words [...] fp32)."""
        wide = values.float()
        if self.has_minimum:
            return self._encode_range(wide)
        most = wide.abs().amax(-1)
        scale = most / self.largest
        inverse = torch.where(most > 0, torch.full_like(most, self.largest) / most, 0.0)
        scaled = wide * inverse.unsqueeze(-1)
        if self.code_dtype == torch.int8:
            scaled.round_()
        return scaled.clamp_(-self.largest, self.largest).to(self.code_dtype), scale

    def decode(self, codes: Tensor, words: Tensor) -> Tensor:
        """codes [..., code bytes] and scale words [...] fp32 -> [..., D] fp32."""
        if not self.has_minimum:
            return codes.float() * words.unsqueeze(-1)
        scale, minimum = (
            words.reshape(-1).contiguous().view(torch.float16).view(*words.shape, 2).float().unbind(-1)
        )
        return _unpacked(codes, self.bits).float() * scale.unsqueeze(-1) + minimum.unsqueeze(-1)

    def _encode_range(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        low, high = wide.aminmax(dim=-1)
        minimum = low.half()
        # from the rounded minimum, so that its error does not add to the codes'
        scale = ((high - minimum.float()).clamp_min(0.0) / self.largest).half()
        inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0).unsqueeze(-1)
        codes = ((wide - minimum.float().unsqueeze(-1)) * inverse).round_().clamp_(0, self.largest)
        words = torch.stack((scale, minimum), dim=-1).view(torch.float32).squeeze(-1)
        return _packed(codes.to(torch.uint8), self.bits), words


@dataclass(frozen=True, slots=True)
class KVFormats:
    """How a cache stores keys, and how values.

    Attributes:
        name: the setting's spelling.
        turns_keys: keys, and the queries that meet them, are ``hadamard``-transformed after their rotary embedding.
    """

    name: str
    keys: KVFormat
    values: KVFormat
    turns_keys: bool = False

    @property
    def head_multiple(self) -> int:
        """What the head size must be a multiple of, so that codes fill whole bytes."""
        return 8 if self.keys.has_minimum else 1


def is_coded(dtype: torch.dtype, kv_dtype: torch.dtype | KVFormats) -> bool:
    """Whether bf16 queries meet keys and values of one byte a number, as GPU kernels for codes want them."""
    is_bytes = isinstance(kv_dtype, KVFormats) and kv_dtype.keys.bits == kv_dtype.values.bits == 8
    return is_bytes and dtype == torch.bfloat16


_INT8 = KVFormat("int8", torch.int8, 8, 127.0)
_E4M3 = KVFormat("fp8_e4m3", torch.float8_e4m3fn, 8, 448.0)
_E5M2 = KVFormat("fp8_e5m2", torch.float8_e5m2, 8, 1792.0)
_INT5 = KVFormat("int5", torch.uint8, 5, 31.0)
_INT4 = KVFormat("int4", torch.uint8, 4, 15.0)

KV_FORMATS = {
    "int8": KVFormats("int8", _INT8, _INT8),
    "fp8_e4m3": KVFormats("fp8_e4m3", _E4M3, _E4M3),
    "fp8_e5m2": KVFormats("fp8_e5m2", _E5M2, _E5M2),
    "int4": KVFormats("int4", _INT5, _INT4, turns_keys=True),
}
"""{``kv_cache_dtype``: formats}."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedCache:
    """What ``rope_and_store`` and ``attention`` take in place of a dense cache [num_blocks, K, B, D].

    Attributes:
        codes: [num_blocks, K, B, code bytes] of the format's type, strided over blocks and heads.
        words: [num_blocks, K, B] fp32, strided alike.
        head_dim: D.
        is_turned: these are keys that ``hadamard`` transforms before they are stored.
    """

    format: KVFormat
    codes: Tensor
    words: Tensor
    head_dim: int
    is_turned: bool = False

    @property
    def block_size(self) -> int:
        """B."""
        return self.codes.shape[2]

    def store(self, values: Tensor, block: Tensor, place: Tensor) -> None:
        """values [T, K, D], turned if need be, into slots (block, place) [T] int64 each."""
        codes, words = self.format.encode(values)
        raw = self.codes.view(torch.uint8)
        raw.transpose(1, 2).index_put_((block, place), codes.view(torch.uint8))
        self.words.transpose(1, 2).index_put_((block, place), words)

    def decode_blocks(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Those blocks [n] int64 as a dense cache [n, K, B, D]; keys stay turned."""
        codes = self.codes.view(torch.uint8)[blocks].view(self.format.code_dtype)
        return self.format.decode(codes, self.words[blocks]).to(dtype)


def hadamard(heads: Tensor) -> Tensor:
    """heads [..., D] fp32 -> the same, turned: orthogonal, and its own inverse.

    Two halves, each in pieces of p elements, the largest power of two that divides D/2: the Hadamard transform of
    every piece together with its counterpart in the other half, 2 p numbers.
    """
    half = heads.shape[-1] // 2
    piece = half & -half
    first, second = heads.unflatten(-1, (2, half)).unbind(-2)
    turned = torch.stack((first + second, first - second), dim=-2)
    step = piece // 2
    while step:
        low, high = turned.unflatten(-1, (-1, 2, step)).unbind(-2)
        turned = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        step //= 2
    return turned.flatten(-2) * (2 * piece) ** -0.5


def _packed(codes: Tensor, bits: int) -> Tensor:
    """codes [..., D] uint8 of 4 or 5 bits -> bytes."""
    first, second = codes.chunk(2, dim=-1)
    nibbles = (first & 15) | ((second & 15) << 4)
    if bits == 4:
        return nibbles
    weights = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=codes.device)
    low, high = (((half >> 4).unflatten(-1, (-1, 4)) * weights).sum(-1) for half in (first, second))
    return torch.cat((nibbles, (low | (high << 4)).to(torch.uint8)), dim=-1)


def _unpacked(raw: Tensor, bits: int) -> Tensor:
    """The inverse of ``_packed``."""
    if bits == 4:
        return torch.cat((raw & 15, raw >> 4), dim=-1)
    size = raw.shape[-1] * 4 // 5
    fifths = raw[..., size:].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=raw.device)
    low, high = ((part.flatten(-2) & 1) << 4 for part in fifths.chunk(2, dim=-1))
    nibbles = raw[..., :size]
    return torch.cat(((nibbles & 15) | low, (nibbles >> 4) | high), dim=-1)
