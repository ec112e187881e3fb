from __future__ import annotations

import asyncio

import pytest

from headrace.engine.mailbox import Mailbox
from headrace.errors import EngineDeadError
from headrace.outputs import CompletionOutput, Logprob, RequestOutput

pytestmark = pytest.mark.anyio


def output(*parts: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], list(parts), finished)


def part(text: str, index: int = 0, **fields: object) -> CompletionOutput:
    tokens = [ord(char) for char in text]
    return CompletionOutput(index, text, tokens, **fields)  # type: ignore[arg-type]


async def test_reader_in_time_gets_each_output() -> None:
    box = Mailbox(1, True, lambda: None)
    reading = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    box.put(0, output(part("a")))
    assert [(i, o.outputs[0].text) for i, o in await reading] == [(0, "a")]
    box.put(0, output(part("b", finish_reason="stop"), finished=True))
    assert not box.is_done
    assert (await box.get())[0][1].outputs[0].text == "b"
    assert box.is_done
    assert await box.get() == []


async def test_parts_that_wait_are_joined() -> None:
    box = Mailbox(2, True, lambda: None)
    first = output(part("ab", logprobs=[{97: Logprob(-1.0)}, {98: Logprob(-2.0)}]))
    first.prompt_logprobs = [None]
    box.put(0, first)
    box.put(1, output(part("x")))
    box.put(0, output(part("z", 1)))
    box.put(0, output(part("c", logprobs=[{99: Logprob(-3.0)}], finish_reason="length"), finished=False))
    got = dict(await box.get())
    joined = {answer.index: answer for answer in got[0].outputs}
    assert (
        joined[0].text == "abc"
        and joined[0].token_ids == [97, 98, 99]
        and joined[0].finish_reason == "length"
    )
    assert [list(entry) for entry in joined[0].logprobs or []] == [[97], [98], [99]]
    assert joined[1].text == "z" and got[0].prompt_logprobs == [None] and got[1].outputs[0].text == "x"


async def test_whole_outputs_replace_each_other() -> None:
    box = Mailbox(1, False, lambda: None)
    box.put(0, output(part("a")))
    box.put(0, output(part("ab")))
    assert [o.outputs[0].text for _, o in await box.get()] == ["ab"]


async def test_error_comes_after_what_was_read_before_it() -> None:
    box = Mailbox(1, True, lambda: None)
    box.put(0, output(part("a")))
    box.fail(EngineDeadError("gone"))
    box.fail(ValueError("later"))
    assert (await box.get())[0][1].outputs[0].text == "a"
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            await box.get()


async def test_reader_that_waits_is_woken_by_an_error() -> None:
    box = Mailbox(1, True, lambda: None)
    reading = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    box.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await reading


async def test_cancelled_reader_loses_nothing() -> None:
    box = Mailbox(1, True, lambda: None)
    reading = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    reading.cancel()
    box.put(0, output(part("a")))
    await asyncio.wait([reading])
    assert (await box.get())[0][1].outputs[0].text == "a"


async def test_closing_twice_tells_once() -> None:
    closed: list[int] = []
    box = Mailbox(1, True, lambda: closed.append(1))
    box.close()
    box.close()
    assert closed == [1]
