"""The PTX of one row times a tile of 4-bit codes, run instruction by instruction for 32 lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from headrace.kernels.triton.row_of_codes import PAIR_PTX, product_ptx

LANES = np.arange(32)
Value = Any
"""[32]: bits as uint32, or fp32 numbers."""


class Warp:
    """Registers of 32 lanes by name; operands ($0, ...) are registers, too."""

    def __init__(self, operands: dict[str, Value]) -> None:
        self.values = dict(operands)

    def run(self, ptx: str) -> None:
        """As far as the instructions are among those of the kernel; others fail."""
        for line in ptx.split(";"):
            name, _, rest = line.lstrip("{} \n").partition(" ")
            if name in ("", ".reg"):
                continue
            self._step(name, re.findall(r"\{[^}]*\}|[^,\s]+", rest))

    def _read(self, place: str) -> Value:
        if place in self.values:
            return as_bits(self.values[place])
        bits = int(place[2:], 16) if place.startswith("0f") else int(place, 0)
        return np.full(32, bits, np.uint32)

    def _step(self, name: str, places: list[str]) -> None:
        if name.startswith("mma."):
            return self._multiply(name, places)
        target, *sources = places
        found = _OPS[name](*map(self._read, sources))
        self.values[target] = found.astype(np.float32) if found.dtype.kind == "f" else found.copy()
        return None

    def _multiply(self, name: str, places: list[str]) -> None:
        """m16n8k32 of bytes; registers of a lane as the instruction has them."""
        left_type, right_type = (np.dtype({"s": "i1", "u": "u1"}[kind[0]]) for kind in name.split(".")[7:9])
        sums, a, b, _ = (re.findall(r"[$\w]+", place) for place in places)
        left, right, total = (np.zeros(size, np.int64) for size in ((16, 32), (32, 8), (16, 8)))
        group, place = LANES // 4, LANES % 4
        for index, operand in enumerate(a):
            numbers = self._read(operand).view(left_type).reshape(32, 4)
            for byte in range(4):
                left[group + 8 * (index % 2), 4 * place + byte + 16 * (index // 2)] = numbers[:, byte]
        for index, operand in enumerate(b):
            numbers = self._read(operand).view(right_type).reshape(32, 4)
            for byte in range(4):
                right[4 * place + byte + 16 * index, group] = numbers[:, byte]
        for index, operand in enumerate(sums):
            total[group + 8 * (index // 2), 2 * place + index % 2] = self._read(operand).view(np.int32)
        total += left @ right
        for index, operand in enumerate(sums):
            found = total[group + 8 * (index // 2), 2 * place + index % 2]
            self.values[operand] = found.astype(np.int32).view(np.uint32)


def as_bits(x: Value) -> Value:
    return x.view(np.uint32)


def as_numbers(x: Value) -> Value:
    return x.view(np.float32)


def _bytes_chosen(low: Value, high: Value, choose: Value) -> Value:
    both = np.stack((as_bits(low), as_bits(high)), axis=1).view(np.uint8)
    places = (as_bits(choose)[:, None] >> (4 * np.arange(4)) & 0xF).astype(int)
    return np.take_along_axis(both, places, axis=1).copy().view(np.uint32)[:, 0]


_OPS: dict[str, Callable[..., Value]] = {
    "mov.b32": lambda x: x,
    "and.b32": lambda x, y: x & y,
    "xor.b32": lambda x, y: x ^ y,
    "shl.b32": lambda x, y: x << y,
    "lop3.b32": lambda x, y, z, kind: (x & y) ^ z,
    "prmt.b32": _bytes_chosen,
    "add.f32": lambda x, y: as_numbers(x) + as_numbers(y),
    "fma.rn.f32": lambda x, y, z: as_numbers(x).astype(np.float64) * as_numbers(y) + as_numbers(z),
}


def digits_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [groups, 32] -> (uint16 of two digits each, what a group is to be multiplied with), as ``digits_of_row``."""
    exponent = np.frexp(np.abs(x).max(1))[1] - 1
    integers = np.rint(np.ldexp(x, 13 - exponent[:, None])).astype(np.int64) + 128
    pairs = [_bytes_of_pairs(integers[:, 0::2], integers[:, 1::2])]
    return pairs[0].view(np.uint16).reshape(x.shape), np.ldexp(1.0, exponent - 13 - 4)


def _bytes_of_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Of 256 a + b + 128 each, by the instructions of the kernel."""
    found = []
    for one, other in zip(first.reshape(-1, 32), second.reshape(-1, 32), strict=True):
        warp = Warp({f"${i}": x.astype(np.int32).view(np.uint32) for i, x in ((1, one), (2, other))})
        warp.run(PAIR_PTX)
        found.append(warp.values["$0"])
    return np.stack(found)


@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize(("chunks", "bands"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_sums_of_groups(chunks: int, bands: int, has_minimums: bool) -> None:
    """Of each band and chunk 16 rows by 4 groups of 32 inputs."""
    choose = np.random.default_rng(0)
    codes = choose.integers(0, 16, (16 * bands, 128 * chunks))
    x = choose.standard_normal((4 * chunks, 32)) * np.exp(choose.standard_normal((4 * chunks, 1)) * 3)
    x = x.astype(np.float16).astype(np.float64)
    x[0, 0] = 2.0**4 - 2.0**-4  # as large as a number gets before its exponent grows
    places = codes.reshape(16 * bands, chunks, 8, 16)  # code j of word w: column 16 j + w
    words = (places << (4 * np.arange(8))[:, None]).sum(2).astype(np.uint32)
    digits, powers = digits_of(x)
    pairs = digits.reshape(-1).view(np.uint32).reshape(chunks, 64)
    operands: list[Value] = []
    row, place, group, digit = LANES // 4, LANES % 4, LANES // 8, LANES // 4 % 2
    for chunk in range(chunks):
        for first_row in range(0, 16 * bands, 8):
            operands += [words[first_row + row, chunk, 4 * place + i] for i in range(4)]
    for chunk in range(chunks):
        operands += [pairs[chunk, 16 * group + 8 * (i // 2) + 2 * place + i % 2] for i in range(4)]
    for second in (0, 1, 0, 1):
        operands.append((0x4444 ^ ((5 + 2 * second - digit) << (4 * group))).astype(np.uint32))
    results = 4 * bands * chunks
    warp = Warp({f"${results + i}": value for i, value in enumerate(operands)})
    warp.run(product_ptx(chunks, bands, has_minimums))

    numbers = codes - (0 if has_minimums else 8)
    exact = (numbers * x.reshape(-1)).reshape(16 * bands, chunks, 4, 32).sum(3)
    for chunk in range(chunks):
        for band in range(bands):
            for half in (0, 1):
                sums = [warp.values[f"${4 * (chunk * bands + band) + 2 * half + i}"] for i in (0, 1)]
                expected = exact[16 * band + 8 * half + row, chunk, place]
                power = powers.reshape(chunks, 4)[chunk, place]
                found = (sums[0].astype(np.float64) + sums[1]) * power
                np.testing.assert_allclose(found, expected, atol=32 * 16 * 8 * power.max())
