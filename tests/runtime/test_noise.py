"""The noise's keys are one function in three dresses, and uniform."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from headrace.runtime.noise import noise_keys
from tests.runtime.sampling_oracle import noise_key

EDGES = [0, 1, -1, 7, 123456789, (1 << 63) - 1, -(1 << 63)]


def test_python_numpy_and_torch_agree() -> None:
    cases = list(itertools.product(EDGES, [0, 1, 127], [0, 1, 4095, 1 << 24]))
    seeds, children, positions = (np.array(column, np.int64) for column in zip(*cases, strict=True))
    plain = [noise_key(*case) for case in cases]
    tensors = noise_keys(torch.from_numpy(seeds), torch.from_numpy(children), torch.from_numpy(positions))
    assert noise_keys(seeds, children, positions).tolist() == plain
    assert tensors.dtype == torch.int64 and tensors.tolist() == plain


def test_every_argument_matters() -> None:
    base = (5, 2, 9)
    values = {noise_key(*base)}
    for place in range(3):
        for step in (1, 2, 1000):
            changed = list(base)
            changed[place] += step
            values.add(noise_key(*changed))
    assert len(values) == 10
    assert noise_key(1, 2, 3) != noise_key(2, 1, 3) and noise_key(1, 2, 3) != noise_key(1, 3, 2)


def to_unit(keys: np.ndarray) -> np.ndarray:
    return (keys.view(np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def test_uniform_and_uncorrelated() -> None:
    size = 200_000
    positions = np.arange(size, dtype=np.int64)
    zeros = np.zeros(size, np.int64)
    along_positions = noise_keys(zeros, zeros, positions)
    along_seeds = noise_keys(positions, zeros, zeros)
    along_children = noise_keys(zeros, positions, zeros)
    for keys in (along_positions, along_seeds, along_children):
        values = to_unit(keys)
        counts = np.bincount((values * 100).astype(int), minlength=100)
        chi_square = float(((counts - size / 100) ** 2 / (size / 100)).sum())
        assert chi_square < 160.0  # 99 degrees of freedom: p about 1e-4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(to_unit(along_positions), to_unit(along_seeds))[0, 1]) < 0.01
    assert abs(np.corrcoef(to_unit(along_positions), to_unit(along_children))[0, 1]) < 0.01
