"""Out of memory, wherever it comes: the ledger and one setting are the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import CacheConfig, EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.errors import ConfigError, DeviceMemoryError, EngineDeadError
from headrace.platforms.cpu import CPUPlatform
from headrace.runtime import model_loader
from headrace.runtime import worker as worker_module
from headrace.runtime.gpu_budget import GpuBudget
from headrace.runtime.memory_ledger import MemoryLedger, is_out_of_memory
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import make_model
from tests.runtime.test_cuda_graph import add_small_steps

GIB = 1 << 30
OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


class FakeGPU(CPUPlatform):
    """100 GiB, of which 70 are held by this process and 10 by others."""

    name = "cuda"
    used = 70 * GIB

    def describe(self) -> str:
        return "a GPU"

    def total_memory_bytes(self) -> int:
        return 100 * GIB

    def available_memory_bytes(self) -> int:
        return 90 * GIB - self.used

    def used_memory_bytes(self) -> int:
        return self.used

    def peak_memory_bytes(self) -> int:
        return self.used


def ledger(**cache: Any) -> MemoryLedger:
    made = MemoryLedger(FakeGPU(), CacheConfig(**cache))
    made.planned |= {"weights": 15 * GIB, "KV blocks": 50 * GIB, "graphs": GIB, "activations": 2 * GIB}
    made.actual |= {"weights": 16 * GIB, "KV blocks": 50 * GIB}
    return made


def message(made: MemoryLedger, use: Any, error: Exception = OUT) -> str:
    with pytest.raises(DeviceMemoryError) as caught, made.watching(use):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def test_the_ledger_is_told_planned_against_actual() -> None:
    text = message(ledger(), "activations")
    assert text.startswith(
        "a GPU has no memory left for activations (2.00 GiB more): weights 15.00 GiB planned, 16.00"
    )
    for part in (
        "KV blocks 50.00 GiB planned, 50.00 GiB actual",
        "graphs 1.00 GiB planned, unknown actual",
        "activations 2.00 GiB planned, 4.00 GiB actual",
        "20.00 GiB of 100.00 GiB free, 10.00 GiB held by others",
    ):
        assert part in text


@pytest.mark.parametrize("use", ["graphs", "activations", "KV blocks"])
def test_the_setting_that_leaves_more_room(use: str) -> None:
    assert "set gpu_memory_utilization to 0.88 (it is 0.9)" in message(ledger(), use)
    large = torch.OutOfMemoryError("Tried to allocate 15.00 GiB")
    assert "set gpu_memory_utilization to 0.75 (it is 0.9)" in message(ledger(), use, large)
    assert "set num_kv_blocks below 7" in message(ledger(num_kv_blocks=7), use)
    assert f"set kv_cache_bytes to {8 * GIB}" in message(ledger(kv_cache_bytes=10 * GIB), use)


def test_weights_that_are_too_large_and_those_that_others_leave_no_room_for() -> None:
    made = ledger()
    made.planned["weights"] = 140 * GIB
    assert "set tensor_parallel_size higher" in message(made, "weights")
    made = ledger()
    made.actual.clear()
    assert "end what else holds memory there" in message(made, "weights")


def test_which_errors_mean_it() -> None:
    for error in (
        OUT,
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        assert is_out_of_memory(error)
    for other in (RuntimeError("shape mismatch"), ValueError("out of memory")):
        assert not is_out_of_memory(other)
        with pytest.raises(type(other)), ledger().watching("graphs"):
            raise other
    with pytest.raises(DeviceMemoryError), ledger().watching("graphs"):
        try:
            raise OUT
        finally:
            raise RuntimeError("the capture was invalidated")
    with pytest.raises(ConfigError), ledger().watching("weights"):
        raise ConfigError("a user's mistake stays one, out of memory or not")


def fail(*arguments: Any, **options: Any) -> Any:
    raise OUT


def config(folder: Path) -> EngineConfig:
    return EngineConfig.from_options(
        model=str(folder),
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_model_len=64,
        kv_cache_bytes=1 << 20,
    )


def run(core: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    core.add_request(EngineCoreRequest("r", [5, 6, 7], params, 8))
    while core.has_work():
        core.step()


def test_while_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    monkeypatch.setattr(model_loader, "build_model", fail)
    with pytest.raises(DeviceMemoryError, match="no memory left for weights"):
        build_engine_core(config(tmp_path))


def test_while_kv_blocks_are_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    monkeypatch.setattr(worker_module, "KVCache", fail)
    with pytest.raises(DeviceMemoryError, match=r"left for KV blocks.*set kv_cache_bytes to"):
        build_engine_core(config(tmp_path))


@pytest.mark.parametrize("call", ["execute_model", "sample_tokens"])
def test_in_a_step(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    core = build_engine_core(config(tmp_path))
    monkeypatch.setattr(core.executor._worker._runner, call, fail)
    with pytest.raises(EngineDeadError, match=r"DeviceMemoryError.*activations.*set kv_cache_bytes to"):
        run(core)


def test_while_a_graph_is_captured(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    core = build_engine_core(config(tmp_path))
    worker = core.executor._worker
    add_small_steps(worker, 4)
    worker._runner.small_steps._capture = worker._forms._booked(fail)
    with pytest.raises(EngineDeadError, match="no memory left for graphs"):
        run(core)


def test_what_a_start_took_is_told(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    core = build_engine_core(config(tmp_path))
    assert list(core.stats().startup_s) == ["weights", "largest step", "KV blocks"]
    assert core.executor._worker._memory.actual["weights"] >= 0
    core.shutdown()


def test_what_a_gpu_has_for_kv_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's share less what it took since it began and what its largest step needs."""
    make_model("llama", tmp_path)
    worker = build_engine_core(config(tmp_path)).executor._worker
    monkeypatch.setattr(worker, "_platform", FakeGPU())
    monkeypatch.setattr(worker, "_start_bytes", 90 * GIB)
    budget = worker._gpu_budget()
    assert budget.share_bytes == 90 * GIB - 70 * GIB - budget.step_bytes - budget.graph_bytes
    assert budget.others_bytes == 10 * GIB and budget.num_bytes == budget.room_bytes == 18 * GIB


def test_no_room_for_one_request_is_answered_with_the_ledger_and_one_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("llama", tmp_path)
    worker = build_engine_core(config(tmp_path)).executor._worker
    budget = GpuBudget(100 * GIB, 22 * GIB, 2 * GIB, GIB, GIB, 0.9)
    for name, value in {
        "_platform": FakeGPU(),
        "_device": torch.device("cuda"),
        "_cache": CacheConfig(),
        "_gpu_budget": lambda: budget,
    }.items():
        monkeypatch.setattr(worker, name, value)
    words = r"hold 0 tokens of one request.*weights .* actual.*held by others.*; end what else holds 78.00 GiB there$"
    with pytest.raises(ConfigError, match=words):
        worker._size_kv_cache()
    assert "gives more than others leave" in caplog.text
