"""Kernels compile beside the weights; graphs wait for all of them, the first step for its own only."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.warmup import ModelWidths
from headrace.runtime import kernel_warmup
from headrace.runtime.kernel_warmup import KernelWarmup
from tests.kernels.triton_setup import DEVICE

WIDTHS = ModelWidths(64, 96, 4, 2, 16, 200, 16, torch.float32)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back what decoding needs."""
    opened = threading.Event()

    def decodes(widths: ModelWidths, device: torch.device) -> dict[str, Any]:
        return {"decodes": lambda: opened.wait(30)}

    monkeypatch.setattr(kernel_warmup, "first_token_calls", lambda widths, device: {"prompts": lambda: None})
    monkeypatch.setattr(kernel_warmup, "decode_calls", decodes)
    return opened


def test_the_first_token_does_not_wait_for_what_decoding_needs(gate: threading.Event) -> None:
    warmup = KernelWarmup(WIDTHS, DEVICE)
    warmup.wait_first_token()
    assert list(warmup.first_token.seconds) == ["prompts"] and not warmup.decode.seconds
    gate.set()
    warmup.wait()
    assert list(warmup.decode.seconds) == ["decodes"]


def test_a_kernel_that_does_not_compile_is_left_to_its_step(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(kernel_warmup, "first_token_calls", lambda widths, device: {"prompts": fail})
    warmup = KernelWarmup(WIDTHS, DEVICE)
    warmup.wait_first_token()
    warmup.wait()
    assert "no such instruction" in caplog.text


def test_the_kernels_of_a_model_run() -> None:
    warmup = KernelWarmup(WIDTHS, DEVICE, num_threads=1)
    warmup.wait()
    assert len(warmup.first_token.seconds) == 8 and warmup.decode.seconds
