"""Ranks as processes: what they say while loading, how they end, and what is told when one fails."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.errors import ConfigError, EngineDeadError
from headrace.runtime.multiproc_executor import MultiprocExecutor
from headrace.runtime.rank_messages import UpdateWeights
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


def config(folder: Path, **options: Any) -> EngineConfig:
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "num_kv_blocks": 64,
        "tensor_parallel_size": 2,
        "rank_timeout_s": 2.0,
    }
    return EngineConfig.from_options(model=str(folder), **{**settings, **options})


def is_alive(pid: int) -> bool:
    """False for what is gone or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_of(core: EngineCore) -> list[int]:
    assert isinstance(core.executor, MultiprocExecutor)
    return core.executor.pids()


def start_request(core: EngineCore, number: int = 0) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    core.add_request(EngineCoreRequest(f"r{number}", [5, 6, 7], params, 100))


def step_until_death(core: EngineCore) -> tuple[EngineDeadError, float]:
    """The error, and how long it took."""
    start_s = time.monotonic()
    number = 1
    with pytest.raises(EngineDeadError) as caught:
        while time.monotonic() - start_s < 30:
            core.step()
            if not core.has_work():
                start_request(core, number)
                number += 1
    return caught.value, time.monotonic() - start_s


def test_a_killed_rank_ends_the_engine(folder: Path) -> None:
    progress: list[tuple[str, float]] = []
    core = build_engine_core(config(folder), lambda stage, share: progress.append((stage, share)))
    assert isinstance(core.executor, MultiprocExecutor)
    stages = dict(progress)  # the last share of each, in order
    assert list(stages) == ["meeting the other ranks", "loading weights", "making room for KV blocks"]
    assert stages["loading weights"] == 1.0
    reports = core.executor.rank_reports()
    assert len(reports) == 2 and all(report.num_kv_blocks == 64 for report in reports)
    assert sum(report.weight_bytes_read for report in reports) > 0
    assert core.stats().rank_memory_bytes == [report.memory_bytes for report in reports]
    start_request(core)
    for _ in range(3):
        core.step()
    pids = pids_of(core)
    os.kill(pids[1], signal.SIGKILL)
    error, took_s = step_until_death(core)
    assert "rank 1 was ended by SIGKILL" in str(error) and "its last step was" in str(error)
    assert took_s < 5
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(EngineDeadError, match="rank 1"):
        core.executor.check_alive()
    core.shutdown()
    core.shutdown()


@pytest.mark.slow
def test_a_rank_that_fails_to_replace_its_weights_ends_all(folder: Path, tmp_path: Path) -> None:
    """Its folder vanishes between the check and the reading: no rank goes on with the new or the old."""
    other = tmp_path / "other"
    make_model("llama", other, seed=2)
    core = build_engine_core(config(folder))
    executor, pids = core.executor, pids_of(core)
    assert isinstance(executor, MultiprocExecutor)
    send = executor._group.send

    def sabotaged(message: Any) -> None:
        if isinstance(message, UpdateWeights):
            shutil.rmtree(other)
        send(message)

    executor._group.send = sabotaged  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match=r"weights could not be replaced.*other"):
        core.update_weights(str(other))
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(EngineDeadError):
        core.step()
    core.shutdown()


@pytest.mark.slow
def test_a_rank_that_hangs_while_loading(folder: Path) -> None:
    """Not before it has begun: that takes as long as importing torch does."""
    stopped: list[int] = []

    def stop_the_second(stage: str, share: float) -> None:
        if not stopped:
            threads = Path("/proc/self/task").glob("*/children")
            stopped.append(max(int(pid) for thread in threads for pid in thread.read_text().split()))
            os.kill(stopped[0], signal.SIGSTOP)

    start_s = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 has come no further .*rank_load_timeout_s \(12\)"):
        MultiprocExecutor(config(folder, rank_load_timeout_s=12.0), stop_the_second)
    assert 12 < time.monotonic() - start_s < 40
    assert stopped and not is_alive(stopped[0])


@pytest.mark.slow
def test_a_frozen_rank(folder: Path) -> None:
    core = build_engine_core(config(folder))
    start_request(core)
    core.step()
    pids = pids_of(core)
    os.kill(pids[0], signal.SIGSTOP)
    error, took_s = step_until_death(core)
    assert "rank 0 has shown no sign of life for" in str(error) and took_s < 6
    assert not any(is_alive(pid) for pid in pids)
    core.shutdown()


@pytest.mark.slow
def test_mistakes_found_while_loading_keep_their_class(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        MultiprocExecutor(config(folder, num_kv_blocks=None, kv_cache_bytes=100))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 4 .* over 1, 2 or 6 ranks"):
        build_engine_core(config(folder, tensor_parallel_size=4))


@pytest.mark.slow
def test_a_shutdown_leaves_nothing_behind(folder: Path) -> None:
    core = build_engine_core(config(folder))
    pids = pids_of(core)
    start_request(core)
    core.step()
    core.shutdown()
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(EngineDeadError, match="shut down"):
        core.executor.check_alive()


@pytest.mark.slow
def test_a_shutdown_amid_steps_is_no_failure(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No rank complains that another, which was done before it, has left."""
    core = build_engine_core(config(folder, tensor_parallel_size=1, pipeline_parallel_size=2))
    pids = pids_of(core)
    for number in range(6):
        start_request(core, number)
    for _ in range(5):
        core.step()
    assert core.scheduler.in_flight
    core.shutdown()
    assert not any(is_alive(pid) for pid in pids)
    assert "fails" not in capfd.readouterr().err
