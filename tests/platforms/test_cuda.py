from __future__ import annotations

import pytest
import torch

from headrace.errors import ConfigError
from headrace.platforms.cuda import CUDAPlatform


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> CUDAPlatform:
    """A platform whose GPU answers from here; enough for what is decided without computing."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "set_device": None,
        "get_device_capability": capability,
        "get_device_name": "Fake GPU",
        "mem_get_info": (30 * 2**30, 40 * 2**30),
        "memory_reserved": 5 * 2**30,
        "memory_allocated": 3 * 2**30,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    return CUDAPlatform()


@pytest.mark.parametrize(
    ("checkpoint", "ampere", "volta"),
    [
        ("bfloat16", torch.bfloat16, torch.float16),
        ("float16", torch.float16, torch.float16),
        ("float32", torch.float32, torch.float32),
        (None, torch.bfloat16, torch.float16),
    ],
)
def test_auto_dtype_is_the_checkpoints(
    checkpoint: str | None, ampere: torch.dtype, volta: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fake_gpu(monkeypatch, (8, 0)).resolve_dtype("auto", checkpoint) == ampere
    assert fake_gpu(monkeypatch, (7, 0)).resolve_dtype("auto", checkpoint) == volta


def test_bf16_before_ampere_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu(monkeypatch, (7, 5))
    assert gpu.resolve_dtype("float16", "bfloat16") == torch.float16
    with pytest.raises(
        ConfigError, match=r"needs compute capability 8\.0, but Fake GPU .* has 7\.5; use dtype='float16'"
    ):
        gpu.resolve_dtype("bfloat16", "bfloat16")


def test_memory_that_torch_holds_unused_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu(monkeypatch, (9, 0))
    assert gpu.total_memory_bytes() == 40 * 2**30
    assert gpu.available_memory_bytes() == 32 * 2**30
    assert gpu.describe() == "Fake GPU (40.0 GiB)"


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    gpu = CUDAPlatform()
    before = gpu.used_memory_bytes()
    gpu.reset_peak_memory()
    start, end = gpu.new_event(), gpu.new_event()
    start.record()
    tensor = torch.ones(64, 2**20, device=gpu.device)
    product = tensor @ tensor.T
    end.record()
    end.wait()
    gpu.synchronize()
    assert end.is_done() and start.elapsed_ms(end) > 0 and product[0, 0] == 2**20
    assert gpu.used_memory_bytes() - before >= tensor.numel() * 4
    assert gpu.peak_memory_bytes() >= gpu.used_memory_bytes()
    assert 0 < gpu.available_memory_bytes() < gpu.total_memory_bytes()
    assert gpu.default_num_threads() >= 1 and gpu.describe()
