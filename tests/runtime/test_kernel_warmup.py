"""Kernels compile beside the weights; graphs wait for all of them, the first step for its own only."""

from __future__ import annotations

import dataclasses
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

from headrace.checkpoint import load_architecture, resolve_model
from headrace.kernels.triton import attention_hopper_tiles
from headrace.kernels.triton.model_widths import LayerForms, ModelWidths, PackedForm, Product
from headrace.quant.precision import Precision
from headrace.runtime import kernel_warmup
from headrace.runtime.kernel_warmup import KernelWarmup, widths_of
from tests.e2e.tiny_models import make_model
from tests.kernels.triton_setup import DEVICE

ROOT = Path(__file__).parents[2]
BYTE, NIBBLE = PackedForm(8, None, False), PackedForm(4, 32, True)
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
    assert not warmup.is_done and attention_hopper_tiles._num_holders
    gate.set()
    warmup.wait()
    assert warmup.is_done and not attention_hopper_tiles._num_holders
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
    assert not attention_hopper_tiles._num_holders
    assert "no such instruction" in caplog.text


def test_the_kernels_of_a_model_run() -> None:
    warmup = KernelWarmup(WIDTHS, DEVICE, num_threads=1)
    warmup.wait()
    assert len(warmup.first_token.seconds) == 8 and warmup.decode.seconds


def walk(
    folder: Path, num_ranks: int = 1, cache: str = "auto", form: str = "auto", overrides: str = ""
) -> dict[str, Any]:
    """What ``walk_variants`` reports."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks/kernels")])
    arguments = [str(folder), str(num_ranks), cache, form, overrides]
    command = [sys.executable, "tests/runtime/walk_variants.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


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
    report = walk(tmp_path, num_ranks, cache)
    assert report["late"] == [] and report["unused"] == []
    num_windows = 2 if model_type == "gemma3" else 1
    assert report["steps"]["_rope_and_store_kernel"] == report["steps"]["top_tokens_kernel"] == 1
    assert (report["steps"]["chunk_race_kernel"], report["steps"]["threshold_kernel"]) == (2, 6)
    assert report["steps"][kernel] == (3 if has_ring else num_windows)


@pytest.mark.parametrize(
    ("form", "overrides", "num_forms"),
    [
        ("int8", "", 1),
        ("auto", "model.layers.1.*=int4-g32,*.2.self_attn.k_proj=int8,lm_head=int8-g64", 3),
    ],
)
def test_each_form_that_linears_have_is_warmed_up(
    tmp_path: Path, form: str, overrides: str, num_forms: int
) -> None:
    """Of packed weights the tiles of some numbers of rows; what one token needs, all of it."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    make_model("llama", tmp_path, intermediate_size=8192, vocab_size=512, **sizes)
    report = walk(tmp_path, form=form, overrides=overrides)
    assert {name for name, _ in report["late"]} <= {
        "packed_wgmma_kernel", "packed_pair_kernel", "packed_sums_kernel",
    }  # fmt: skip
    assert report["unused"] == []
    assert report["steps"]["packed_row_kernel"] >= num_forms


def test_forms_are_told_once_each_in_the_order_of_the_layers(tmp_path: Path) -> None:
    make_model("llama", tmp_path, num_hidden_layers=6)
    arch = load_architecture(resolve_model(str(tmp_path)))
    sizes = {"num_heads": 4, "num_kv_heads": 2, "tensor_parallel_size": 1, "block_size": 16, "is_whole": True}
    dtype = {"dtype": torch.float16, "kv_dtype": torch.float16}

    def forms(form: str, overrides: str = "", layers: range | None = None) -> ModelWidths:
        precision = Precision.parse(form, overrides)
        return widths_of(arch, **sizes, **dtype, precision=precision, layers=layers)  # type: ignore[arg-type]

    byte, nibble = BYTE, NIBBLE
    assert forms("auto").layer_forms == (LayerForms(),)
    assert forms("int8").layer_forms == (LayerForms.all_in(byte),)
    mixed = forms("int8", "model.layers.[24].*=int4,model.layers.5.mlp.up_proj=none,lm_head=none")
    up = dataclasses.replace(LayerForms.all_in(byte), up_proj=None)
    assert mixed.layer_forms == (LayerForms.all_in(byte), LayerForms.all_in(nibble), up)
    assert not mixed.has_stack and (mixed.embedding_form, mixed.head_form) == (byte, None)
    inner, hidden = arch.intermediate_size, arch.hidden_size
    assert Product(inner, hidden, False, byte) in mixed.products
    assert Product(inner, hidden, False, None) in mixed.products
    assert Product(2 * inner, hidden, False, nibble) in mixed.products and len(mixed.products) == 10
    assert forms("int8", "model.layers.[24].*=int4", range(3, 5)).layer_forms == mixed.layer_forms[:2]
    assert len(forms("int8", "model.layers.[24].*=int4", range(4, 5)).layer_forms) == 1


@pytest.mark.parametrize(
    ("forms", "is_stackable"),
    [
        ([LayerForms()], True),
        ([LayerForms.all_in(BYTE)], True),
        ([LayerForms(), LayerForms.all_in(BYTE)], False),
        ([dataclasses.replace(LayerForms.all_in(BYTE), down_proj=NIBBLE)], True),
        ([dataclasses.replace(LayerForms.all_in(BYTE), down_proj=None)], False),
        ([dataclasses.replace(LayerForms.all_in(BYTE), k_proj=NIBBLE)], False),
    ],
)
def test_a_decode_stack_has_layers_that_are_alike(forms: list[LayerForms], is_stackable: bool) -> None:
    widths = ModelWidths(
        1024, 3072, 16, 8, 128, 512, 16, torch.bfloat16, num_layers=2, layer_forms=tuple(forms)
    )
    assert widths.has_stack == is_stackable
