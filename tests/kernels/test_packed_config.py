"""How codes are taken out of words by bits: the PTX, which the interpreter does not run, evaluated step by step."""

from __future__ import annotations

import random
import struct

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.packed_config import PackedConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def config(bits: int, has_minimums: bool) -> PackedConfig:
    return PackedConfig(256, bits, 32, 16, 16, 16, has_minimums, has_bias=False)


def code_of(word: int, plane: int, bits: int, has_minimums: bool) -> int:
    """A plane's code, less its offset."""
    code = (word >> (bits * plane)) & ((1 << bits) - 1)
    if bits == 8:
        return code - 256 if code > 127 else code
    return code if has_minimums else code - 8


@pytest.mark.parametrize("number", list(DTYPES))
@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_pairs_of_weights(bits: int, has_minimums: bool, number: str) -> None:
    choose, dtype = random.Random(bits), DTYPES[number]
    for plane in range(32 // bits):
        ptx = config(bits, has_minimums).pair_ptx(plane, number)
        for _ in range(8):
            words = [choose.getrandbits(32) for _ in range(2)]
            scale, minimum = _rounded(choose.random(), dtype), _rounded(choose.random() - 0.5, dtype)
            result = evaluate(ptx, [0, *words, _twice(scale, dtype), _twice(minimum, dtype)])
            for word, found in zip(words, _halves(result, dtype), strict=True):
                weight = scale * code_of(word, plane, bits, has_minimums) + minimum * has_minimums
                assert float(found) == _rounded(weight, dtype)


@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_fields(bits: int, has_minimums: bool) -> None:
    choose, found = random.Random(bits), config(bits, has_minimums)
    for plane in range(32 // bits):
        for _ in range(8):
            word = choose.getrandbits(32)
            flipped, shift = word ^ (found.flip & 0xFFFFFFFF), found.shift_left(plane)
            moved = (flipped << shift) & 0xFFFFFFFF if shift > 0 else flipped >> -shift
            bytes_ = struct.pack("I", evaluate(found.field_ptx(plane), [0, moved]))
            value = struct.unpack("f", bytes_)[0] - found.field_excess(plane)
            assert value == code_of(word, plane, bits, has_minimums)


def evaluate(ptx: str, arguments: list[int]) -> int:
    """What the block leaves in $0."""
    registers = {f"${place}": value for place, value in enumerate(arguments)}

    def value(text: str) -> int:
        return registers[text] if text in registers else int(text, 0)

    for statement in ptx.strip(" {}").split(";"):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        name, rest = statement.strip().split(None, 1)
        target, *sources = (part.strip() for part in rest.split(","))
        registers[target] = _OPERATIONS[name](*map(value, sources))
    return registers["$0"]


def _prmt(low: int, high: int, select: int) -> int:
    both = low | high << 32
    return sum((both >> 8 * (select >> 4 * place & 7) & 255) << 8 * place for place in range(4))


def _lop3(a: int, b: int, c: int, table: int) -> int:
    bits = ((a >> place & 1) * 4 + (b >> place & 1) * 2 + (c >> place & 1) for place in range(32))
    return sum((table >> index & 1) << place for place, index in enumerate(bits))


def _fma(number: str, a: int, b: int, c: int) -> int:
    x, y, z = (_halves(word, DTYPES[number]).double() for word in (a, b, c))
    low, high = (x * y + z).to(DTYPES[number]).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": lambda *words: _fma("bf16", *words),
    "fma.rn.f16x2": lambda *words: _fma("fp16", *words),
}


def _halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    parts = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
    return parts.to(torch.int16).view(dtype)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _twice(number: float, dtype: torch.dtype) -> int:
    half = int(torch.tensor([number], dtype=dtype).view(torch.int16)) & 0xFFFF
    return half | half << 16
