"""The PTX of one row times a tile of 4-bit codes, run instruction by instruction for 32 lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from headrace.kernels.triton.row_of_codes import product_ptx

LANES = np.arange(32)
Value = Any
"""[32]: bits as uint32, fp32 numbers, or predicates."""


def as_bits(x: Value) -> Value:
    return x.view(np.uint32) if x.dtype == np.float32 else x


def as_numbers(x: Value) -> Value:
    return x.view(np.float32) if x.dtype == np.uint32 else x


class Warp:
    """Registers of 32 lanes by name; operands ($0, ...) are registers, too."""

    def __init__(self, operands: dict[str, Value], number: str) -> None:
        self.values, self._number = dict(operands), number

    def run(self, ptx: str) -> None:
        """As far as the instructions are among those that ``product_ptx`` uses; others fail."""
        for line in ptx.split(";"):
            name, _, rest = line.lstrip("{} \n").partition(
                " "
            )  # blocks, whose registers have names of their own
            if name in ("", ".reg"):
                continue
            places = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
            self._step(name, places)

    def _read(self, place: str) -> Value:
        if place in self.values:
            return self.values[place]
        if place == "%laneid":
            return LANES.astype(np.uint32)
        if place.startswith("!"):
            return ~self.values[place[1:]]
        if place.startswith("0f"):
            return np.full(32, int(place[2:], 16), np.uint32).view(np.float32)
        return np.full(32, int(place, 0) & 0xFFFFFFFF, np.uint32)

    def _step(self, name: str, places: list[str]) -> None:
        if name.startswith("mma."):
            return self._multiply(places)
        target, *sources = places
        if target.startswith("{"):  # a register's halves
            low, high = re.findall(r"\w+", target)
            bits = as_bits(self._read(sources[0]))
            self.values[low], self.values[high] = bits & 0xFFFF, bits >> 16
            return None
        self.values[target] = _OPS[name](*map(self._read, sources)).copy()
        return None

    def _numbers(self, bits: Value) -> Value:
        """[32, 2] of a register's halves."""
        halves = np.stack((bits & 0xFFFF, bits >> 16), axis=1).astype(np.uint32)
        if self._number == "bf16":
            return (halves << 16).view(np.float32)
        return halves.astype(np.uint16).view(np.float16).astype(np.float32)

    def _multiply(self, places: list[str]) -> None:
        """m16n8k16, in fp64; registers of a lane as the instruction has them."""
        sums, a, b, _ = (re.findall(r"[$\w]+", place) for place in places)
        left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        group, place = LANES // 4, LANES % 4
        for index, name in enumerate(a):
            numbers = self._numbers(as_bits(self._read(name)))
            for half in (0, 1):
                left[group + 8 * (index % 2), 2 * place + half + 8 * (index // 2)] = numbers[:, half]
        for index, name in enumerate(b):
            numbers = self._numbers(as_bits(self._read(name)))
            for half in (0, 1):
                right[2 * place + half + 8 * index, group] = numbers[:, half]
        for index, name in enumerate(sums):
            total[group + 8 * (index // 2), 2 * place + index % 2] = as_numbers(self._read(name))
        total += left @ right
        for index, name in enumerate(sums):
            self.values[name] = total[group + 8 * (index // 2), 2 * place + index % 2].astype(np.float32)


def _shuffled(source: Callable[[Value], Value]) -> Callable[..., Value]:
    return lambda value, by, *_: as_bits(value)[source(as_bits(by).astype(int))]


_OPS: dict[str, Callable[..., Value]] = {
    "mov.u32": lambda x: x,
    "mov.b32": lambda x: x,
    "mov.f32": as_numbers,
    "and.b32": lambda x, y: x & y,
    "add.u32": lambda x, y: x + y,
    "shl.b32": lambda x, y: x << y,
    "shr.u32": lambda x, y: x >> y,
    "lop3.b32": lambda x, y, z, kind: (x & y) | z,
    "setp.ne.u32": lambda x, y: x != y,
    "selp.b32": lambda x, y, chosen: np.where(chosen, as_bits(x), as_bits(y)),
    "selp.f32": lambda x, y, chosen: np.where(chosen, as_numbers(x), as_numbers(y)),
    "and.pred": lambda x, y: x & y,
    "or.pred": lambda x, y: x | y,
    "not.pred": lambda x: ~x,
    "add.f32": lambda x, y: as_numbers(x) + as_numbers(y),
    "fma.rn.f32": lambda x, y, z: as_numbers(x) * as_numbers(y) + as_numbers(z),
    "cvt.f32.f16": lambda x: x.astype(np.uint16).view(np.float16).astype(np.float32),
    "shfl.sync.bfly.b32": _shuffled(lambda by: LANES ^ by),
    "shfl.sync.idx.b32": _shuffled(lambda by: by),
}


@pytest.mark.parametrize("number", ["bf16", "fp16"])
@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize(("chunks", "bands"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_sums_of_groups(chunks: int, bands: int, has_minimums: bool, number: str) -> None:
    """Of each band 16 rows by 8 groups of 32 inputs, and the sums of x; a warp has 128 or 256 inputs."""
    choose = np.random.default_rng(0)
    codes = choose.integers(0, 16, (16 * bands, 128 * chunks))
    x = choose.standard_normal(128 * chunks).astype(np.float16 if number == "fp16" else np.float32)
    bits = x.view(np.uint16) if number == "fp16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    x = x if number == "fp16" else (bits.astype(np.uint32) << 16).view(np.float32)
    places = codes.reshape(16 * bands, chunks, 8, 16)  # code j of word w: column 16 j + w
    words = (places << (4 * np.arange(8))[:, None]).sum(2).astype(np.uint32)
    operands: list[Value] = []
    row, first_word, group = LANES // 4, 4 * (LANES % 4), LANES // 4 % (4 * chunks)
    for chunk in range(chunks):
        for first_row in range(0, 16 * bands, 8):
            operands += [words[first_row + row, chunk, first_word + i] for i in range(4)]
    columns = 32 * group + first_word
    operands += [bits[columns + 16 * plane + i].astype(np.uint32) for plane in (0, 1) for i in range(4)]
    results = 4 * (bands + 1)
    warp = Warp({f"${results + i}": value for i, value in enumerate(operands)}, number)
    warp.run(product_ptx(chunks, bands, number, has_minimums))

    numbers = codes - (0 if has_minimums else 8)
    exact = (numbers * x.astype(np.float64)).reshape(16 * bands, -1, 32).sum(2)
    x_sums = x.astype(np.float64).reshape(-1, 32).sum(1)
    for index in range(4):
        column = 2 * (LANES % 4) + index % 2
        real = column < 4 * chunks
        for band in range(bands):
            rows = 16 * band + 8 * (index // 2) + row
            expected = np.where(real, exact[rows, column % (4 * chunks)], 0.0)
            np.testing.assert_allclose(warp.values[f"${4 * band + index}"], expected, atol=0.02)
        expected = np.where(real, x_sums[column % (4 * chunks)], 0.0)
        np.testing.assert_allclose(warp.values[f"${4 * bands + index}"], expected, atol=1e-4)
