"""The device's noise against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from headrace.kernels.reference.noise import exponentials
from headrace.kernels.triton.noise import exponential_of
from tests.kernels.triton_setup import DEVICE


@triton.jit
def noise_kernel(key_ptr, out_ptr, num_tokens, BLOCK: tl.constexpr):
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    noise = exponential_of(tl.load(key_ptr + row), token)
    tl.store(out_ptr + row * num_tokens + token, noise, mask=token < num_tokens)


@pytest.mark.parametrize("vocab", [3, 128, 700])
def test_same_numbers(vocab: int) -> None:
    keys = torch.from_numpy(np.random.default_rng(vocab).integers(-(2**63), 2**63 - 1, 5))
    keys[0] = 0
    found = torch.empty(5, vocab, device=DEVICE)
    noise_kernel[(5,)](keys.to(DEVICE), found, vocab, BLOCK=triton.next_power_of_2(vocab))
    assert torch.allclose(found.cpu(), exponentials(keys, vocab), rtol=1e-5, atol=0)
