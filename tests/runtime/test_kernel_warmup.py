"""Kernels compile beside the weights; graphs wait for all of them, the first step for its own only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton.model_widths import ModelWidths
from headrace.runtime import kernel_warmup
from headrace.runtime.kernel_warmup import KernelWarmup
from tests.e2e.tiny_models import make_model
from tests.kernels.triton_setup import DEVICE

ROOT = Path(__file__).parents[2]
WIDTHS = ModelWidths(64, 96, 4, 2, 16, 200, 16, torch.float32)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back what decoding needs."""
    opened = threading.Event()

    def decodes(widths: ModelWidths, device: torch.device, exchange: Any = None) -> dict[str, Any]:
        return {"decodes": lambda: opened.wait(30)}

    monkeypatch.setattr(kernel_warmup, "first_token_calls", lambda widths, device: {"prompts": lambda: None})
    monkeypatch.setattr(kernel_warmup, "decode_calls", decodes)
    return opened


def test_the_first_token_does_not_wait_for_what_decoding_needs(gate: threading.Event) -> None:
    warmup = KernelWarmup(WIDTHS, DEVICE)
    warmup.wait_first_token()
    assert list(warmup.first_token.seconds) == ["prompts"] and not warmup.decode.seconds
    assert not warmup.is_done
    gate.set()
    warmup.wait()
    assert warmup.is_done
    assert list(warmup.decode.seconds) == ["decodes"]


def test_a_kernel_that_does_not_compile_is_left_to_its_step(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(kernel_warmup, "first_token_calls", lambda widths, device: {"prompts": fail})
    warmup = KernelWarmup(WIDTHS, DEVICE)
    warmup.wait_first_token()
    gate.set()
    warmup.wait()
    assert "no such instruction" in caplog.text


def test_the_kernels_of_a_model_run() -> None:
    warmup = KernelWarmup(WIDTHS, DEVICE, num_threads=1)
    warmup.wait()
    assert len(warmup.first_token.seconds) == 8 and warmup.decode.seconds


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "cache", "kernel"),
    [
        ("llama", 1, "auto", "short_tiles_kernel"),
        ("gemma3", 1, "auto", "short_tiles_kernel"),
        ("llama", 2, "auto", "short_tiles_kernel"),
        ("llama", 1, "fp8_e4m3", "coded_ring_kernel"),
        ("llama", 1, "int4", "short_tiles_kernel"),
    ],
)
def test_steps_of_all_sizes_compile_nothing_that_was_not_warmed_up(
    tmp_path: Path, model_type: str, num_ranks: int, cache: str, kernel: str
) -> None:
    """Nor is anything compiled in several variants, or in vain."""
    has_ring = kernel == "coded_ring_kernel"
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 128 if has_ring else 64}
    make_model(model_type, tmp_path, intermediate_size=8192, vocab_size=512, **sizes)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks/kernels")])
    command = [sys.executable, "tests/runtime/walk_variants.py", str(tmp_path), str(num_ranks), cache]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["late"] == [] and report["unused"] == []
    num_windows = 2 if model_type == "gemma3" else 1
    assert report["steps"]["_rope_and_store_kernel"] == report["steps"]["chunk_race_kernel"] == 1
    assert report["steps"][kernel] == (3 if has_ring else num_windows)
