from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from headrace.platforms.base import DTypeName
from headrace.platforms.cpu import CPUPlatform
from headrace.platforms.host_limits import HostLimits


def platform(root: Path, flags: str, key: str = "flags\t\t") -> CPUPlatform:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\n{key}: fpu {flags} avx2\n\nprocessor\t: 1\n")
    return CPUPlatform(HostLimits(root))


@pytest.mark.parametrize("flags", ["amx_bf16", "avx512_bf16 amx_bf16 amx_tile"])
@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float32),
        ("float32", torch.float32),
        (None, torch.float32),
    ],
)
def test_auto_dtype_with_fast_bf16(
    flags: str, checkpoint: str | None, expected: torch.dtype, tmp_path: Path
) -> None:
    assert platform(tmp_path, flags).resolve_dtype("auto", checkpoint) == expected


@pytest.mark.parametrize("key", ["flags\t\t", "Features\t"])
def test_dot_products_of_bf16_are_not_fast_enough(key: str, tmp_path: Path) -> None:
    found = platform(tmp_path, "i8mm bf16 avx512_bf16", key)
    assert found.resolve_dtype("auto", "bfloat16") == torch.float32


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float16", "float32", None])
def test_auto_dtype_without_fast_bf16_is_fp32(checkpoint: str | None, tmp_path: Path) -> None:
    assert platform(tmp_path, "avx512f").resolve_dtype("auto", checkpoint) == torch.float32


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_requested_dtype_is_taken(name: DTypeName) -> None:
    assert CPUPlatform().resolve_dtype(name, "float32") == getattr(torch, name)


def test_events_keep_the_time() -> None:
    cpu = CPUPlatform()
    start, end = cpu.new_event(), cpu.new_event()
    start.record()
    time.sleep(0.02)
    end.record()
    end.wait()
    assert end.is_done() and 19 < start.elapsed_ms(end) < 2000


def test_memory_and_description() -> None:
    cpu = CPUPlatform()
    assert 0 < cpu.used_memory_bytes() <= cpu.peak_memory_bytes()
    assert cpu.available_memory_bytes() < cpu.total_memory_bytes()
    cpu.reset_peak_memory()
    cpu.synchronize()
    assert cpu.describe().startswith(f"cpu ({cpu.default_num_threads()} cores, ")
