from __future__ import annotations

import random

import pytest

from headrace.core.output import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from headrace.core.timeline import Timeline
from headrace.engine.output_pace import MAX_CHUNKS_PER_S, MAX_GAP_S, MAX_HOLD_S, OutputPace
from tests.engine.recorder import core_request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """Feeds a pace one token a stream and step."""

    def __init__(self, interval: int | None = None) -> None:
        self.clock = Clock()
        self.pace = OutputPace(interval, self.clock)
        self.pace.flush()  # chunks were sent just now

    def step(self, names: list[str], token: int = 1, after_s: float = 0.02) -> list[EngineCoreOutput]:
        self.clock.now += after_s
        return self.pace.take([EngineCoreOutput(name, 0, [token]) for name in names])


def names(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def whole(request_id: str, n: int = 1) -> EngineCoreRequest:
    request = core_request(request_id, [1], 9, n=n)
    request.is_read_whole = True
    return request


@pytest.mark.parametrize("step_s", [0.0001, 0.02])
def test_few_streams_have_every_token_at_once(step_s: float) -> None:
    steps = Steps()
    for token in range(50):
        out = steps.step(names(4), token, step_s)
        assert [item.new_token_ids for item in out] == [[token]] * 4


def test_many_streams_share_a_budget_of_chunks() -> None:
    steps = Steps()
    sizes = [len(steps.step(names(32), token)) for token in range(101)]
    assert sizes[0] == 32  # first tokens do not wait
    assert sizes[1:].count(32) == 50 and sizes[1:].count(0) == 50
    slow = [len(steps.step(names(32), token, after_s=MAX_GAP_S)) for token in range(10)]
    assert slow == [32] * 10
    steps = Steps()
    chunks = sum(len(steps.step(names(12), after_s=0.001)) for _ in range(1000))
    assert chunks == pytest.approx(MAX_CHUNKS_PER_S, rel=0.1)


def test_what_was_held_comes_in_order() -> None:
    steps = Steps(3)
    out = [item.new_token_ids for token in range(6) for item in steps.step(["a"], token)]
    assert out == [[0], [1, 2, 3]]
    assert [item.new_token_ids for item in steps.pace.flush()] == [[4, 5]] and not steps.pace.flush()


def test_the_last_news_take_along_what_was_held() -> None:
    steps = Steps(100)
    steps.step(["a", "b"])
    assert steps.step(["a", "b"], 2) == []
    end = EngineCoreOutput(
        "a", 0, [3], finish_reason="stop", stop_reason=3, num_cached_tokens=7, timeline=Timeline()
    )
    (out,) = steps.pace.take([end])
    assert (out.new_token_ids, out.finish_reason, out.stop_reason) == ([2, 3], "stop", 3)
    assert out.num_cached_tokens == 7 and out.timeline is end.timeline


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_end_without_a_token_stays_by_itself(is_whole: bool) -> None:
    """A grammar that is satisfied ends an answer so; the last token before it is text."""
    steps = Steps(100)
    if is_whole:
        steps.pace.expect(whole("a"))
    steps.step(["a"], 1)
    steps.step(["a"], 2)
    held, end = steps.pace.take([EngineCoreOutput("a", finish_reason="stop")])
    assert (held.new_token_ids, held.finish_reason) == ([2], None)
    assert (end.new_token_ids, end.finish_reason) == ([], "stop")


def test_prompt_logprobs_are_not_the_first_news() -> None:
    steps = Steps(100)
    steps.step(["a"])
    entry = TokenLogprobs([1], [-1.0], 1)
    for _ in range(2):
        (out,) = steps.pace.take([EngineCoreOutput("b", prompt_logprobs=[entry])])
        assert out.prompt_logprobs == [entry]
    assert len(steps.step(["b"])) == 1 and not steps.step(["b"])


def test_answers_that_are_read_whole_come_first_and_last() -> None:
    for interval in (None, 1, 4):
        steps = Steps(interval)
        steps.pace.expect(whole("a"))
        assert len(steps.step(["a"])) == 1
        assert sum(len(steps.step(["a"], after_s=0.001)) for _ in range(100)) == 0
        (out,) = steps.step(["a"], after_s=MAX_HOLD_S)
        assert len(out.new_token_ids) == 101
        (out,) = steps.pace.take([EngineCoreOutput("a", 0, [5], finish_reason="length")])
        assert out.new_token_ids == [5]


def test_streams_beside_an_answer_that_is_read_whole() -> None:
    steps = Steps(1)
    steps.pace.expect(whole("a", n=2))
    for token in range(5):
        assert [item.request_id for item in steps.step(["a", "b"], token)] == (
            ["a", "b"] if token == 0 else ["b"]
        )
    steps.pace.take([EngineCoreOutput("a", child, finish_reason="length") for child in range(2)])
    assert not steps.pace._whole
    steps.pace.take([EngineCoreOutput("b", finish_reason="length")])
    assert not steps.pace._begun and not steps.pace._streams


@pytest.mark.parametrize("interval", [None, 1, 2, 5])
def test_nothing_is_lost_or_mixed_up(interval: int | None) -> None:
    rng = random.Random(f"pace {interval}")
    steps = Steps(interval)
    sent: dict[tuple[str, int], list[int]] = {}
    got: dict[tuple[str, int], list[int]] = {}
    running = [(name, child) for name in names(9) for child in range(2)]
    for name in names(3):
        steps.pace.expect(whole(name, n=2))
    while running:
        steps.clock.now += rng.choice([0.001, 0.01, 0.1])
        news = []
        for key in rng.sample(running, rng.randint(0, len(running))):
            tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 3))]
            sent.setdefault(key, []).extend(tokens)
            item = EngineCoreOutput(*key, list(tokens), [TokenLogprobs([t], [-1.0], 1) for t in tokens])
            if rng.random() < 0.02:
                item.finish_reason = "length"
                running.remove(key)
            news.append(item)
        for item in steps.pace.take(news):
            assert [entry.token_ids[0] for entry in item.logprobs or []] == item.new_token_ids
            got.setdefault((item.request_id, item.child_index), []).extend(item.new_token_ids)
    assert got == sent
    assert not (steps.pace._begun or steps.pace._whole or steps.pace._streams or steps.pace._wholes)
