"""A rank that dies under the engine's own process: requests are answered, the cause is named, nobody is left over."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import ENGINE_CORE, AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
from headrace.errors import EngineDeadError
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import make_model
from tests.runtime.test_multiproc_executor import is_alive

pytestmark = pytest.mark.anyio
LIMIT_S = 10.0


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
        "max_model_len": 512,
        "num_kv_blocks": 400,
        "tensor_parallel_size": 2,
    }
    return EngineConfig.from_options(model=str(folder), **{**settings, **options})


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, in order."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


async def answer(llm: AsyncLLM, name: str, num_tokens: int) -> int:
    """How many tokens came. Raises what the engine raises."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    count = 0
    async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, name):
        count = len(output.outputs[0].token_ids)
    return count


class Engine:
    """An engine core in a process of its own, over ranks."""

    def __init__(self, folder: Path, **options: Any) -> None:
        settings = config(folder, **options)
        self._client = ProcessClient(CoreSpec(ENGINE_CORE, settings))
        self.llm = AsyncLLM(settings, self._client)
        self.ranks: list[int] = []

    async def start(self) -> None:
        """Until the first answer."""
        assert await answer(self.llm, "warm", 4) == 4
        self.ranks = children_of(self._client.pid)

    def all_ended(self) -> bool:
        """Nobody is left over, within a moment."""
        for _ in range(30):
            if not any(is_alive(pid) for pid in [self._client.pid, *self.ranks]):
                return True
            time.sleep(0.1)
        return False


async def die_under_load(
    folder: Path, victim: int, delay_s: float, kind: signal.Signals, **options: Any
) -> tuple[str, float]:
    """Strike a rank while requests run; (what they were told, seconds until the last was told)."""
    engine = Engine(folder, **options)
    try:
        await engine.start()
        requests = [asyncio.create_task(answer(engine.llm, f"r{number}", 400)) for number in range(6)]
        await asyncio.sleep(delay_s)
        start_s = time.monotonic()
        os.kill(engine.ranks[victim], kind)
        results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), LIMIT_S)
        took_s = time.monotonic() - start_s
        assert all(isinstance(result, EngineDeadError) for result in results), results
        assert len({str(result) for result in results}) == 1
    finally:
        await engine.llm.shutdown()
    assert engine.all_ended()
    return str(results[0]), took_s


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
async def test_twenty_kills_at_random_points(folder: Path, sizes: tuple[int, int]) -> None:
    rng = random.Random(sum(sizes))
    parallel = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    for _ in range(20 if sizes == (2, 1) else 5):
        victim = rng.randrange(sizes[0] * sizes[1])
        message, took_s = await die_under_load(
            folder, victim, rng.uniform(0, 0.4), signal.SIGKILL, **parallel
        )
        assert f"rank {victim}" in message and "was ended by SIGKILL" in message, message
        assert "its last step was" in message and took_s < LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
async def test_a_rank_that_hangs(folder: Path, sizes: tuple[int, int], victim: int) -> None:
    parallel = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    message, took_s = await die_under_load(folder, victim, 0.1, signal.SIGSTOP, **parallel)
    assert f"rank {victim} " in message and "has shown no sign of life for" in message
    assert "its last step was" in message, "completed or not: it may be stopped between two"
    assert took_s < LIMIT_S


@pytest.mark.slow
async def test_a_rank_that_dies_while_nothing_runs(folder: Path) -> None:
    engine = Engine(folder)
    await engine.start()
    start_s = time.monotonic()
    os.kill(engine.ranks[1], signal.SIGKILL)
    while engine.llm.is_ready and time.monotonic() - start_s < LIMIT_S:
        await asyncio.sleep(0.05)
    with pytest.raises(EngineDeadError, match="rank 1 was ended by SIGKILL"):
        await answer(engine.llm, "late", 3)
    await engine.llm.shutdown()
    assert engine.all_ended()


@pytest.mark.slow
async def test_ranks_end_with_an_engine_that_is_killed(folder: Path) -> None:
    engine = Engine(folder)
    await engine.start()
    os.kill(engine._client.pid, signal.SIGKILL)
    assert engine.all_ended()
    await engine.llm.shutdown()
