from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.client import EngineCoreClient, failure_of, refusal_error
from headrace.engine.messages import CoreFailed, CoreSpec, Refusal
from headrace.engine.process_client import ProcessClient
from headrace.engine.thread_client import ThreadClient
from headrace.errors import CapacityError, CheckpointError, EngineDeadError, RequestError
from tests.engine.recorder import Recorder, core_request, until

pytestmark = pytest.mark.anyio
NULL = "headrace.engine.null_core:build_null_core"
FAULTY = "tests.engine.faulty_core"
Starter = Callable[..., tuple[EngineCoreClient, Recorder]]


def spec(factory: str = NULL, **options: object) -> CoreSpec:
    if factory == NULL:
        options.setdefault("tokens", [10, 11, 12, 13])
    return CoreSpec(factory, EngineConfig.from_options(max_num_seqs=2, max_waiting_requests=3), dict(options))


@pytest.fixture(params=[ProcessClient, ThreadClient])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Starter]:
    started: list[EngineCoreClient] = []

    def go(core: CoreSpec) -> tuple[EngineCoreClient, Recorder]:
        client, recorder = request.param(core), Recorder()
        started.append(client)
        client.listen(recorder)
        return client, recorder

    yield go
    for client in started:
        client.shutdown()


async def test_an_interval_makes_messages_fewer(start: Starter) -> None:
    config = EngineConfig.from_options(max_num_seqs=2, stream_interval=4)
    client, heard = start(CoreSpec(NULL, config, {"tokens": [10, 11, 12, 13]}))
    client.add_request(core_request("a", [1, 2], 21))
    await until(lambda: heard.is_finished("a"))
    assert heard.tokens("a") == [12, 13, 10, 11] * 5 + [12]
    sizes = [len(item.new_token_ids) for item in heard.outputs("a")]
    assert sizes[0] == 1 and len(sizes) <= 8 and max(sizes) == 4
    assert [size for news in heard.news for size in news.step_tokens] == [1] * 21


async def test_a_request_that_comes_sends_what_streams_wait_for(start: Starter) -> None:
    config = EngineConfig.from_options(max_num_seqs=1, stream_interval=1000)
    client, heard = start(CoreSpec(NULL, config, {"tokens": [10, 11], "step_s": 0.001}))
    client.add_request(core_request("a", [1], 10_000))
    await until(lambda: len(heard.tokens("a")) > 2)
    before, num_messages = len(heard.tokens("a")), len(heard.outputs("a"))
    await asyncio.sleep(0.05)
    client.add_request(core_request("b", [1], 1))
    await until(lambda: len(heard.tokens("a")) > before, 0.5)
    assert len(heard.outputs("a")) == num_messages + 1
    client.abort_requests(["a"])


async def test_a_busy_core_tells_its_state_though_nothing_is_sent(start: Starter) -> None:
    client, heard = start(spec(step_s=0.001))
    request = core_request("a", [1], 10_000)
    request.is_read_whole = True
    client.add_request(request)
    await until(lambda: len([news for news in heard.news if news.stats is not None]) > 3, 0.8)
    assert len(heard.outputs("a")) <= 2
    client.abort_requests(["a"])


async def test_a_core_whose_steps_give_nothing_tells_its_state(start: Starter) -> None:
    """The chunks of a long prompt are such steps."""
    client, heard = start(spec(f"{FAULTY}:slow_prompts"))
    client.add_request(core_request("a", [1], 10))
    await until(lambda: any((news.stats or {}).get("num_running") for news in heard.news), 2)
    assert not heard.tokens("a")
    client.abort_requests(["a"])


async def test_answers_arrive_in_order_one_message_a_step(start: Starter) -> None:
    client, heard = start(spec())
    client.add_request(core_request("a", [1, 2], 3))
    client.add_request(core_request("b", [1, 2, 3], 5))
    await until(lambda: heard.is_finished("a") and heard.is_finished("b"))
    assert heard.tokens("a") == [12, 13, 10]
    assert heard.tokens("b") == [13, 10, 11, 12, 13]
    assert len(heard.ready) == 1 and heard.progress
    assert len(heard.news) <= 3 + 5 + 1
    assert heard.news[-1].stats == {"num_running": 0, "num_waiting": 0}
    assert heard.outputs("a")[-1].timeline is not None


async def test_a_busy_core_tells_its_state_now_and_then(start: Starter) -> None:
    client, heard = start(spec(step_s=0.002))
    client.add_request(core_request("r", [1], 150))
    await until(lambda: heard.is_finished("r"))
    told = [news.stats for news in heard.news if news.stats is not None]
    assert 3 <= len(told) < len(heard.news) / 3
    assert told[0]["num_running"] == 1 and told[-1]["num_running"] == 0


async def test_requests_added_while_loading_wait(start: Starter) -> None:
    client, heard = start(spec())
    assert not heard.ready
    client.add_request(core_request("early", [1], 1))
    await until(lambda: heard.is_finished("early"))


async def test_abort_stops_a_request_and_the_gauges_fall_unasked(start: Starter) -> None:
    client, heard = start(spec(step_s=0.005))
    client.add_request(core_request("long", [1], 100_000, n=2))
    await until(lambda: heard.tokens("long"))
    client.abort_requests(["long", "unknown"])
    await until(lambda: heard.news[-1].stats and heard.news[-1].stats["num_running"] == 0)
    given = len(heard.tokens("long"))
    client.add_request(core_request("next", [1], 4))
    await until(lambda: heard.is_finished("next"))
    assert len(heard.tokens("long")) == given


async def test_one_answer_ends_and_its_siblings_go_on(start: Starter) -> None:
    client, heard = start(spec(step_s=0.002))
    client.add_request(core_request("r", [1], 60, n=2))
    await until(lambda: len(heard.tokens("r")) > 4)
    client.abort_child("r", 0)
    await until(lambda: sum(o.finish_reason is not None for o in heard.outputs("r")) == 2)
    ends = {o.child_index: o.finish_reason for o in heard.outputs("r") if o.finish_reason}
    assert ends == {0: "abort", 1: "length"}
    assert sum(len(o.new_token_ids) for o in heard.outputs("r") if o.child_index == 1) == 60


async def test_full_queue_is_refused_with_its_typed_error(start: Starter) -> None:
    client, heard = start(spec(step_s=0.01))
    for index in range(8):
        client.add_request(core_request(f"r{index}", [1], 50))
    await until(lambda: heard.refusals)
    error = refusal_error(heard.refusals[0])
    assert isinstance(error, CapacityError) and "at most 3" in str(error)


async def test_loading_failure_keeps_its_class(start: Starter) -> None:
    client, heard = start(spec(f"{FAULTY}:cannot_load"))
    await until(lambda: heard.deaths)
    assert isinstance(heard.deaths[0], CheckpointError) and "cut after 12 bytes" in str(heard.deaths[0])
    with pytest.raises(CheckpointError):
        client.check_alive()


async def test_unknown_factory_is_reported(start: Starter) -> None:
    _, heard = start(spec("no_such_module:f"))
    await until(lambda: heard.deaths)
    assert "no_such_module" in str(heard.deaths[0])


async def test_failing_step_ends_the_core_with_its_cause(start: Starter) -> None:
    client, heard = start(spec(f"{FAULTY}:crashes", steps=2))
    client.add_request(core_request("a", [1], 10))
    await until(lambda: heard.deaths)
    await asyncio.sleep(0.7)
    assert len(heard.deaths) == 1
    assert isinstance(heard.deaths[0], EngineDeadError) and "a step failed" in str(heard.deaths[0])
    assert len(heard.tokens("a")) == 2
    with pytest.raises(EngineDeadError):
        client.add_request(core_request("b", [1], 1))
    client.abort_requests(["a"])


async def test_unexpected_error_in_add_request_ends_the_core(start: Starter) -> None:
    client, heard = start(spec(f"{FAULTY}:refuses"))
    client.add_request(core_request("bad", [1], 1))
    await until(lambda: heard.deaths)
    assert "RuntimeError" in str(heard.deaths[0])


async def test_shutdown_is_no_death(start: Starter) -> None:
    client, heard = start(spec())
    await until(lambda: heard.ready)
    client.shutdown()
    client.shutdown()
    await asyncio.sleep(0.7)
    assert not heard.deaths


async def test_killed_process_is_reported_at_once_with_the_signal() -> None:
    client, heard = ProcessClient(spec(step_s=0.01)), Recorder()
    client.listen(heard)
    client.add_request(core_request("a", [1], 100_000))
    await until(lambda: heard.tokens("a"))
    os.kill(client.pid, signal.SIGKILL)
    killed = time.monotonic()
    await until(lambda: heard.deaths)
    assert time.monotonic() - killed < 2
    assert "SIGKILL" in str(heard.deaths[0])
    client.shutdown()


async def test_engine_process_outlives_the_signals_of_its_group() -> None:
    client, heard = ProcessClient(spec()), Recorder()
    client.listen(heard)
    await until(lambda: heard.ready)
    os.kill(client.pid, signal.SIGINT)
    os.kill(client.pid, signal.SIGTERM)
    client.add_request(core_request("a", [1], 2))
    await until(lambda: heard.is_finished("a"))
    client.shutdown()
    assert not is_running(client.pid)


async def test_hung_core_is_killed_at_shutdown() -> None:
    client, heard = ProcessClient(spec(step_s=60.0)), Recorder()
    client.listen(heard)
    await until(lambda: heard.ready)
    client.add_request(core_request("a", [1], 2))
    await asyncio.sleep(0.2)
    client.shutdown(timeout_s=0.2)
    assert not is_running(client.pid)


PARENT = """
import sys, time
from headrace.config import EngineConfig
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
client = ProcessClient(CoreSpec("headrace.engine.null_core:build_null_core", EngineConfig(), {"tokens": [5]}))
assert "torch" not in sys.modules
print(client.pid, client._folder, flush=True)
time.sleep(60)
"""


async def test_parent_death_ends_the_engine_and_leaves_no_folder() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    parent.kill()
    parent.wait()
    await until(lambda: not is_running(int(pid)), 10)
    await until(lambda: not Path(folder).exists(), 10)


def is_running(pid: int) -> bool:
    """False for zombies too: in a container nobody may reap an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_foreign_failures_become_engine_dead() -> None:
    error = failure_of(CoreFailed("OutOfMemoryError", "no room"))
    assert isinstance(error, EngineDeadError) and "OutOfMemoryError" in str(error)
    assert type(refusal_error(Refusal("r", "ValueError", "m", "stop", "c"))) is RequestError
