"""The device's noise against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.reference import noise as reference
from headrace.kernels.triton.noise import exponentials
from tests.kernels.triton_setup import DEVICE


@pytest.mark.parametrize("vocab", [3, 128, 700])
def test_same_numbers(vocab: int) -> None:
    keys = torch.from_numpy(np.random.default_rng(vocab).integers(-(2**63), 2**63 - 1, 5))
    keys[0] = 0
    found = exponentials(keys.to(DEVICE), vocab).cpu()
    assert torch.allclose(found, reference.exponentials(keys, vocab), rtol=1e-5, atol=0)
