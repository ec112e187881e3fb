"""The device's noise against the plain function, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.noise import uniforms
from headrace.runtime.noise import uniform
from tests.kernels.triton_setup import DEVICE


@pytest.mark.parametrize("stream", [0, 3])
def test_same_bits(stream: int) -> None:
    generator = torch.Generator().manual_seed(stream)
    seeds = torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator)
    children = torch.randint(0, 100, (300,), generator=generator)
    positions = torch.randint(0, 1 << 20, (300,), generator=generator)
    found = uniforms(seeds.to(DEVICE), children.to(DEVICE), positions.to(DEVICE), stream).tolist()
    triples = zip(seeds.tolist(), children.tolist(), positions.tolist(), strict=True)
    assert found == [uniform(*triple, stream) for triple in triples]
