"""AsyncLLM over cores without a model, in a process and in a thread."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.output_processor import RequestOutputKind
from headrace.engine.process_client import ProcessClient
from headrace.engine.thread_client import ThreadClient
from headrace.errors import CapacityError, CheckpointError, EngineDeadError, RequestError
from headrace.sampling_params import SamplingParams
from tests.engine.recorder import until

pytestmark = pytest.mark.anyio
NULL = "headrace.engine.null_core:build_null_core"
COUNT = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216]  # "1, 2, 3, 4, "
TWELVE = [5] * 12
Starter = Callable[..., AsyncLLM]


@pytest.fixture(params=[ProcessClient, ThreadClient])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Starter]:
    started: list[AsyncLLM] = []

    def go(
        step_s: float = 0.0, factory: str = NULL, core: dict[str, Any] | None = None, **engine: Any
    ) -> AsyncLLM:
        config = EngineConfig.from_options(**engine)
        options = {"tokens": COUNT, "step_s": step_s} if core is None else core
        started.append(AsyncLLM(config, request.param(CoreSpec(factory, config, options))))
        return started[-1]

    yield go
    for llm in started:
        await llm.shutdown()


async def text(llm: AsyncLLM, prompt: Any, **params: Any) -> str:
    last = None
    async for output in llm.generate(prompt, SamplingParams(**params)):
        last = output
    assert last is not None and last.finished
    return last.outputs[0].text


async def test_outputs_grow_until_finished(start: Starter) -> None:
    llm = start()
    texts = []
    async for output in llm.generate(TWELVE, SamplingParams(max_tokens=6), "mine"):
        texts.append(output.outputs[0].text)
        assert output.request_id == "mine"
    assert texts[-1] == "1, 2, " and texts == sorted(texts, key=len)
    assert llm.num_unfinished == 0


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_kinds_of_output(start: Starter, kind: RequestOutputKind) -> None:
    llm = start()
    parts = [o async for o in llm.generate(TWELVE, SamplingParams(max_tokens=9), kind=kind)]
    texts = [o.outputs[0].text for o in parts]
    if kind is RequestOutputKind.DELTA:
        assert "".join(texts) == "1, 2, 3, "
    elif kind is RequestOutputKind.FINAL_ONLY:
        assert texts == ["1, 2, 3, "]
    else:
        assert texts[-1] == "1, 2, 3, "


async def test_many_at_once(start: Starter) -> None:
    llm = start(max_num_seqs=3)
    texts = await asyncio.gather(*(text(llm, [5] * (12 + i), max_tokens=4) for i in range(12)))
    whole = "1, 2, 3, 4, " * 2
    assert texts == [whole[i : i + 4] for i in range(12)]


async def test_wrong_requests_are_refused_before_they_run(start: Starter) -> None:
    llm = start()
    for prompt, params in (("", {}), ([10**9], {}), ([5] * 9000, {}), ("Hi", {"stop_token_ids": [10**8]})):
        with pytest.raises(RequestError):
            await text(llm, prompt, **params)
    with pytest.raises(RequestError, match="first come"):
        await llm.submit(["Hi"], SamplingParams(), priority=1)
    with pytest.raises(RequestError):
        await llm.submit(["Hi", ""], SamplingParams())
    assert llm.num_unfinished == 0 and llm.metrics.num_prompt_tokens == 0


async def test_id_in_use_is_refused(start: Starter) -> None:
    llm = start(step_s=0.01)
    box = await llm.submit(["Hi"], SamplingParams(max_tokens=1000), request_id="a")
    with pytest.raises(RequestError, match="in use"):
        await llm.submit(["Hi"], SamplingParams(), request_id="a")
    box.close()


async def test_leaving_the_iteration_aborts(start: Starter) -> None:
    llm = start(step_s=0.002)
    outputs = llm.generate("Hi", SamplingParams(max_tokens=5000, n=2))
    async for _ in outputs:
        break
    await outputs.aclose()  # type: ignore[attr-defined]
    assert llm.num_unfinished == 0
    await until(lambda: llm.metrics.core_stats["num_running"] == 0, 3)
    assert llm.metrics.num_finished["abort"] == 2


async def test_cancelled_task_aborts(start: Starter) -> None:
    llm = start(step_s=0.002)
    await llm.wait_ready()
    tasks = [asyncio.create_task(text(llm, f"Tale {i}", max_tokens=5000)) for i in range(40)]
    await until(lambda: llm.metrics.num_generation_tokens > 0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: llm.metrics.core_stats["num_running"] + llm.metrics.core_stats["num_waiting"] == 0, 3)
    assert llm.num_unfinished == 0


async def test_abort_by_id_gives_a_last_output(start: Starter) -> None:
    llm = start(step_s=0.002)
    reasons = []
    async for output in llm.generate("Hi", SamplingParams(max_tokens=5000), "a"):
        reasons.append(output.outputs[0].finish_reason)
        llm.abort("a")
    assert reasons[-1] == "abort" and set(reasons[:-1]) <= {None}
    llm.abort("unknown")


async def test_stop_string_ends_the_answer_in_the_core_too(start: Starter) -> None:
    llm = start(step_s=0.001)
    assert await text(llm, TWELVE, max_tokens=5000, stop=["3"]) == "1, 2, "
    await until(lambda: llm.num_unfinished == 0, 3)
    assert llm.metrics.num_finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert llm.metrics.num_generation_tokens == 7
    assert llm.metrics.histograms["time_to_first_token_seconds"].cumulative()[-1][1] == 1


@pytest.mark.parametrize("interval", [1, 1000])
async def test_metrics_of_a_stop_string_shortly_before_the_limit(start: Starter, interval: int) -> None:
    """With an interval its news and those of the end come together; the core knows the limit alone."""
    llm = start(stream_interval=interval)
    assert await text(llm, TWELVE, max_tokens=10, stop=["3"]) == "1, 2, "
    await until(lambda: llm.num_unfinished == 0, 3)
    assert llm.metrics.num_finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    histograms = llm.metrics.histograms
    assert llm.metrics.num_generation_tokens == histograms["request_generation_tokens"].total == 7
    assert histograms["inter_token_latency_seconds"].cumulative()[-1][1] == 6


async def test_what_was_held_is_told_before_the_core_fails(start: Starter) -> None:
    llm = start(factory="tests.engine.faulty_core:crashes", core={"steps": 5}, stream_interval=1000)
    llm.metrics.core_stats["num_held_blocks"] = 3
    tokens: list[int] = []
    with pytest.raises(EngineDeadError):
        async for output in llm.generate("Hi", SamplingParams(max_tokens=50, n=2)):
            tokens = [len(answer.token_ids) for answer in output.outputs]
    assert tokens == [5, 5] and llm.metrics.num_generation_tokens == 10
    assert llm.metrics.num_finished["error"] == 2, "as many as were told"
    assert not any(llm.metrics.core_stats[gauge] for gauge in ("num_running", "num_held_blocks"))


async def test_stop_string_of_one_answer_leaves_the_others(start: Starter) -> None:
    llm = start(step_s=0.001)
    last = None
    async for output in llm.generate(TWELVE, SamplingParams(max_tokens=10, n=2, stop=["1, 2"])):
        last = output
    assert last is not None
    # the made-up second answer is one token ahead of the first
    ends = [(answer.text, answer.finish_reason) for answer in last.outputs]
    assert ends == [("", "stop"), (", 2, 3, 4,", "length")]


async def test_counters_tell_what_usage_tells(start: Starter) -> None:
    llm = start()
    await text(llm, TWELVE, max_tokens=6)
    await text(llm, [5] * 3, max_tokens=4, n=2)
    await until(lambda: llm.num_unfinished == 0)
    assert llm.metrics.num_prompt_tokens == 15 and llm.metrics.num_generation_tokens == 14
    assert llm.metrics.num_finished["length"] == 3


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_an_interval_changes_where_outputs_are_cut_and_nothing_else(
    start: Starter, kind: RequestOutputKind
) -> None:
    cases: list[dict[str, Any]] = [
        {"max_tokens": 30},
        {"max_tokens": 30, "n": 3},
        {"max_tokens": 30, "logprobs": 1, "prompt_logprobs": 1, "n": 2},
        {"max_tokens": 5000, "stop": ["4, 1"]},
        {"max_tokens": 5000, "stop": ["4, 1"], "include_stop_str_in_output": True, "logprobs": 0},
        {"max_tokens": 5000, "stop_token_ids": [36]},
    ]
    found = []
    for interval in (1, 7):
        llm = start(step_s=0.0005, stream_interval=interval)
        for case in cases:
            found.append(await _joined(llm, kind, SamplingParams(**case)))
        await until(lambda llm=llm: llm.num_unfinished == 0)
        found.append((llm.metrics.num_generation_tokens, llm.metrics.num_finished))
        steps = llm.metrics.histograms["iteration_tokens_total"]
        assert steps.cumulative()[-1][1] >= 30 * len(cases) / 2
        times = llm.metrics.histograms["inter_token_latency_seconds"]
        assert times.total / times.cumulative()[-1][1] < 0.005
    assert found[: len(found) // 2] == found[len(found) // 2 :]


async def _joined(llm: AsyncLLM, kind: RequestOutputKind, params: SamplingParams) -> Any:
    """Everything that a reader is told of a request, however it was cut."""
    parts: dict[int, list[Any]] = {}
    async for output in llm.generate(TWELVE, params, kind=kind):
        for answer in output.outputs:
            part = [answer.text, answer.token_ids, answer.logprobs or []]
            older = parts.get(answer.index)
            if kind is RequestOutputKind.DELTA and older is not None:
                part = [a + b for a, b in zip(older, part, strict=False)]
            parts[answer.index] = [*part, answer.finish_reason, answer.stop_reason, answer.cumulative_logprob]
        last = output
    assert last.finished
    return sorted(parts.items()), last.num_cached_tokens


async def test_full_queue(start: Starter) -> None:
    llm = start(step_s=0.005, max_num_seqs=1, max_waiting_requests=1)
    boxes = [await llm.submit(["Hi"], SamplingParams(max_tokens=1000))]
    await boxes[0].get()  # it runs: of those that come now one waits, and the next is one too many
    boxes += [await llm.submit(["Hi"], SamplingParams(max_tokens=1000)) for _ in range(2)]
    with pytest.raises(CapacityError) as caught:
        while True:
            await boxes[-1].get()
    assert caught.value.code == "queue_full"
    for box in boxes:
        box.close()


async def test_core_that_cannot_load(start: Starter) -> None:
    llm = start(factory="tests.engine.faulty_core:cannot_load", core={})
    with pytest.raises(CheckpointError, match="cut after"):
        await llm.wait_ready()
    with pytest.raises(CheckpointError):
        await text(llm, "Hi")


async def test_model_that_does_not_exist(start: Starter) -> None:
    llm = start(model="/no/such.gguf")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            await text(llm, "Hi")


async def test_core_that_dies_fails_every_reader(start: Starter) -> None:
    llm = start(factory="tests.engine.faulty_core:crashes", core={"steps": 3})
    results = await asyncio.gather(
        *(text(llm, "Hi", max_tokens=50) for _ in range(5)), return_exceptions=True
    )
    assert all(isinstance(r, EngineDeadError) and "a step failed" in str(r) for r in results)
    assert not llm.is_ready and llm.num_unfinished == 0
    with pytest.raises(EngineDeadError):
        await text(llm, "Hi")


async def test_killed_process(anyio_backend: str) -> None:
    config = EngineConfig()
    client = ProcessClient(CoreSpec(NULL, config, {"tokens": COUNT, "step_s": 0.002}))
    llm = AsyncLLM(config, client)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        async for _ in llm.generate("Hi", SamplingParams(max_tokens=5000)):
            os.kill(client.pid, signal.SIGKILL)
    await llm.shutdown()


async def test_shutdown_fails_what_runs(start: Starter) -> None:
    llm = start(step_s=0.002)
    task = asyncio.create_task(text(llm, "Hi", max_tokens=5000))
    await until(lambda: llm.metrics.num_generation_tokens > 0)
    await llm.shutdown()
    await llm.shutdown()
    with pytest.raises(EngineDeadError):
        await task


async def test_an_aborted_id_can_be_used_again_at_once(start: Starter) -> None:
    llm = start(step_s=0.002)
    for _ in range(12):
        first = llm.generate(TWELVE, SamplingParams(max_tokens=9), "same")
        await anext(first)
        await first.aclose()
        last = None
        async for output in llm.generate(TWELVE, SamplingParams(max_tokens=6), "same"):
            last = output
        assert last is not None and last.request_id == "same"
        assert last.outputs[0].finish_reason == "length" and last.outputs[0].text == "1, 2, "
    await until(lambda: llm.num_unfinished == 0)


async def test_a_running_id_is_refused(start: Starter) -> None:
    llm = start(step_s=0.02)
    first = llm.generate(TWELVE, SamplingParams(max_tokens=9), "same")
    await anext(first)
    with pytest.raises(RequestError, match="'same' is in use"):
        await anext(llm.generate(TWELVE, SamplingParams(max_tokens=6), "same"))
    await first.aclose()
