from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.core.output import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from headrace.core.timeline import Timeline
from headrace.engine.output_processor import OutputProcessor, RequestOutputKind
from headrace.outputs import RequestMetrics, RequestOutput
from headrace.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def timeline(*token_times: float) -> Timeline:
    events = [("QUEUED", 1.0, ""), ("RUNNING", 2.0, ""), ("FINISHED", token_times[-1], "stop")]
    return Timeline(events=events, token_times=list(token_times))


class Session:
    """One request of an OutputProcessor, fed by hand."""

    def __init__(
        self, kind: RequestOutputKind, tokenizer: Any = TOKENIZER, prompt: str = "Hi", **params: Any
    ) -> None:
        self.processor = OutputProcessor(tokenizer)
        sampling = SamplingParams(**{"max_tokens": 100, **params})
        request = EngineCoreRequest("r", ids(prompt), sampling, 100, arrival_time=0.5)
        self.processor.add_request(request, prompt, kind)
        self.outputs: list[RequestOutput] = []
        self.stopped: list[tuple[str, int]] = []

    def feed(self, token_ids: list[int], child: int = 0, **fields: Any) -> RequestOutput | None:
        item = EngineCoreOutput("r", child, token_ids, **fields)
        outputs, stopped = self.processor.process([item])
        self.stopped += stopped
        self.outputs += outputs
        return outputs[0] if outputs else None

    def texts(self) -> list[str]:
        return [output.outputs[0].text for output in self.outputs]


def test_cumulative_outputs_hold_everything_so_far() -> None:
    session = Session(CUMULATIVE)
    session.feed(ids("Hel"), num_cached_tokens=1)
    session.feed(ids("lo"))
    session.feed(ids("!"), finish_reason="length", timeline=timeline(3.0, 4.0))
    assert session.texts() == ["Hel", "Hello", "Hello!"]
    assert [output.finished for output in session.outputs] == [False, False, True]
    last = session.outputs[-1]
    assert last.prompt == "Hi" and last.prompt_token_ids == ids("Hi") and last.num_cached_tokens == 1
    assert last.outputs[0].token_ids == ids("Hello!") and last.outputs[0].finish_reason == "length"
    assert session.outputs[0].outputs[0].token_ids == ids("Hel")  # earlier outputs keep what they showed
    assert session.processor.request_ids == []


def test_deltas_hold_what_is_new() -> None:
    session = Session(DELTA)
    for piece in ("He", "l", "lo"):
        session.feed(ids(piece))
    session.feed([*ids("!"), EOS], finish_reason="stop")
    assert session.texts() == ["He", "l", "lo", "!"]
    assert [output.outputs[0].token_ids for output in session.outputs] == [
        ids("He"), ids("l"), ids("lo"), [*ids("!"), EOS]
    ]  # fmt: skip
    assert [output.outputs[0].finish_reason for output in session.outputs] == [None, None, None, "stop"]


@pytest.mark.parametrize("ending", [{"finish_reason": "length"}, {"finish_reason": "abort"}])
def test_news_with_a_stop_string_and_an_end_say_what_the_user_is_told(ending: dict[str, str]) -> None:
    """Tokens of several steps come together: what the core computed past the stop string counts nowhere."""
    session = Session(DELTA, stop=["cd"])
    item = EngineCoreOutput("r", 0, ids("abcdef"), timeline=timeline(*range(3, 9)), **ending)
    (output,), stopped = session.processor.process([item])
    assert (output.outputs[0].text, output.outputs[0].finish_reason, stopped) == ("ab", "stop", [])
    assert (item.new_token_ids, item.finish_reason) == (ids("abcd"), "stop")
    assert item.timeline is not None and item.timeline.token_times == [3, 4, 5, 6]
    assert output.metrics is not None and output.metrics.token_times == [[3, 4, 5, 6]]


def test_an_end_that_comes_after_a_stop_string_is_told_as_the_user_was() -> None:
    session = Session(DELTA, stop=["cd"])
    session.feed(ids("abcd"))
    late = [EngineCoreOutput("r", 0, ids("ef")), EngineCoreOutput("r", 0, ids("g"), finish_reason="length")]
    late[1].timeline = timeline(*range(3, 10))
    assert session.processor.process(late).outputs == []
    assert [item.new_token_ids for item in late] == [[], []] and late[1].finish_reason == "stop"
    assert late[1].timeline.token_times == [3, 4, 5, 6]


def test_final_only_gives_one_output() -> None:
    session = Session(FINAL_ONLY)
    assert session.feed(ids("Hel")) is None
    output = session.feed(ids("lo"), finish_reason="length")
    assert output is not None and output.outputs[0].text == "Hello"
    assert len(session.outputs) == 1


def test_text_is_never_half_a_character() -> None:
    emoji = ids("🎉")
    assert len(emoji) == 4
    session = Session(DELTA)
    for token in emoji:
        session.feed([token])
    session.feed(emoji[:2], finish_reason="length")  # cut inside a character: it shows as one
    assert session.texts() == ["", "", "", "🎉", "\ufffd"]


def test_stop_string_ends_the_answer_before_the_core_does() -> None:
    session = Session(DELTA, stop=["END", "never"])
    session.feed(ids("one E"))
    session.feed(ids("ND two"))
    assert session.texts() == ["one ", ""]
    answer = session.outputs[-1].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "END")
    assert session.outputs[-1].finished and session.stopped == [("r", 0)]
    tokens = [token for output in session.outputs for token in output.outputs[0].token_ids]
    assert tokens == ids("one END")  # the tokens after the stop string are left out
    # The core learns of it later: what it computed meanwhile is dropped, its receipt is not.
    assert session.outputs[-1].metrics is None
    assert session.feed(ids(" three")) is None
    assert session.feed([], finish_reason="abort", timeline=timeline(3.0, 4.0, 5.0)) is None
    assert session.outputs[-1].metrics is not None and session.outputs[-1].metrics.finished_time == 5.0
    assert session.stopped == [("r", 0)] and session.processor.request_ids == []


def test_stop_string_that_the_core_ends_with_needs_no_abort() -> None:
    session = Session(FINAL_ONLY, stop=["END"])
    output = session.feed(ids("one END"), finish_reason="length")
    assert output is not None and output.outputs[0].finish_reason == "stop" and session.stopped == []


def test_stop_string_in_the_output_when_asked_for() -> None:
    session = Session(FINAL_ONLY, stop=["END"], include_stop_str_in_output=True)
    output = session.feed(ids("one END two"))
    assert output is not None and output.outputs[0].text == "one END"


def test_a_stop_string_that_never_completes_is_given_back() -> None:
    session = Session(DELTA, stop=["END"])
    session.feed(ids("the E"))
    session.feed(ids("N"), finish_reason="length")
    assert session.texts() == ["the ", "EN"]
    assert session.outputs[-1].outputs[0].stop_reason is None


def test_no_stop_string_within_min_tokens() -> None:
    session = Session(FINAL_ONLY, stop=["E"], min_tokens=3)
    output = session.feed(ids("EEEabE"))
    assert output is not None and output.outputs[0].text == "EEEab"


@pytest.mark.parametrize(("keep", "text"), [(False, "Hi"), (True, "Hi.")])
def test_the_token_that_stops_is_not_text(keep: bool, text: str) -> None:
    session = Session(FINAL_ONLY, stop_token_ids=ids("."), include_stop_str_in_output=keep)
    output = session.feed(ids("Hi."), finish_reason="stop", stop_reason=ids(".")[0])
    assert output is not None
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, ids("Hi."), ids(".")[0])


def test_special_tokens() -> None:
    for skip, text in ((True, "ab"), (False, "a<eos>b")):
        session = Session(FINAL_ONLY, skip_special_tokens=skip)
        output = session.feed([*ids("a"), EOS, *ids("b")], finish_reason="length")
        assert output is not None and output.outputs[0].text == text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_without_text(tokenizer: Any) -> None:
    session = Session(DELTA, tokenizer=tokenizer, detokenize=False, logprobs=0)
    session.feed(ids("ab"), logprobs=[TokenLogprobs([t], [-1.0], 1) for t in ids("ab")])
    answer = session.outputs[0].outputs[0]
    assert answer.text == "" and answer.token_ids == ids("ab")
    assert answer.logprobs is not None and answer.logprobs[0][ids("a")[0]].decoded_token is None


def test_n_answers_finish_apart() -> None:
    session = Session(DELTA, n=3)
    news = [EngineCoreOutput("r", child, ids("abc"[child])) for child in range(3)]
    outputs, _ = session.processor.process(news)
    assert len(outputs) == 1 and [a.index for a in outputs[0].outputs] == [0, 1, 2]
    assert [a.text for a in outputs[0].outputs] == ["a", "b", "c"]
    first = session.feed(ids("x"), 1, finish_reason="length")
    assert first is not None and not first.finished and [a.index for a in first.outputs] == [1]
    session.feed(ids("y"), 0, finish_reason="length")
    last = session.feed(ids("z"), 2, finish_reason="length")
    assert last is not None and last.finished and session.processor.request_ids == []


def test_n_answers_come_together_at_the_end() -> None:
    session = Session(FINAL_ONLY, n=2, stop=["E"])
    assert session.feed(ids("abEc"), 1) is None and session.stopped == [("r", 1)]
    assert session.feed([], 1, finish_reason="abort", timeline=timeline(3.0)) is None
    output = session.feed(ids("xy"), 0, finish_reason="length", timeline=timeline(3.5, 4.0))
    assert output is not None and [a.text for a in output.outputs] == ["xy", "ab"]
    assert [a.finish_reason for a in output.outputs] == ["length", "stop"]
    assert output.metrics is not None and output.metrics.token_times == [[3.5, 4.0], [3.0]]


def test_cumulative_with_n_shows_all_answers() -> None:
    session = Session(CUMULATIVE, n=2)
    output = session.feed(ids("a"), 1)
    assert output is not None and [a.text for a in output.outputs] == ["", "a"]


def test_an_error_ends_one_answer_with_its_message() -> None:
    session = Session(CUMULATIVE)
    session.feed(ids("abc"))
    output = session.feed([], finish_reason="error", message="logits are not finite")
    assert output is not None and output.finished
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.error) == ("abc", "error", "logits are not finite")


def test_logprobs() -> None:
    a, b, c = ids("abc")
    session = Session(DELTA, logprobs=2)
    entries = [
        TokenLogprobs([a, b, c], [-3.0, -0.5, -1.0], 7),
        TokenLogprobs([b, b, a], [-0.25, -0.25, -2.0], 1),
    ]
    output = session.feed([a, b], logprobs=entries)
    assert output is not None
    answer = output.outputs[0]
    assert answer.cumulative_logprob == -3.25 and answer.logprobs is not None
    assert list(answer.logprobs[0]) == [a, b, c]
    assert [(p.logprob, p.rank, p.decoded_token) for p in answer.logprobs[0].values()] == [
        (-3.0, 7, "a"), (-0.5, 1, "b"), (-1.0, 2, "c")
    ]  # fmt: skip
    assert [(t, p.rank) for t, p in answer.logprobs[1].items()] == [(b, 1), (a, 2)]
    output = session.feed([c], logprobs=[TokenLogprobs([c], [-1.0], 1)], finish_reason="length")
    assert output is not None and output.outputs[0].logprobs is not None
    assert [list(p) for p in output.outputs[0].logprobs] == [[c]]


def test_logprob_texts_join_to_the_text() -> None:
    session = Session(FINAL_ONLY, logprobs=0)
    tokens = [*ids("né🎉"), EOS]
    entries = [TokenLogprobs([token], [-1.0], 1) for token in tokens]
    output = session.feed(tokens, logprobs=entries, finish_reason="stop")
    assert output is not None and output.outputs[0].logprobs is not None
    texts = [p[token].decoded_token for p, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
    assert texts == ["n", "", "é", "", "", "", "🎉", "<eos>"]


def test_logprobs_after_a_stop_string_are_left_out() -> None:
    session = Session(FINAL_ONLY, logprobs=0, stop=["b"])
    tokens = ids("abcd")
    output = session.feed(tokens, logprobs=[TokenLogprobs([token], [-1.0], 1) for token in tokens])
    assert output is not None and output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs) == 2 and output.outputs[0].cumulative_logprob == -2.0


@pytest.mark.parametrize("start", [0, 1, 3])
def test_prompt_logprobs(start: int) -> None:
    prompt = ids("abcde")
    session = Session(DELTA, prompt="abcde", prompt_logprobs=0, logprobs_from=start)
    first = max(start, 1)
    entries = [TokenLogprobs([token], [-float(i)], 1) for i, token in enumerate(prompt)]
    assert (
        session.feed([], prompt_logprobs=entries[first:4]) is None
    )  # one chunk of the prompt, nothing to show yet
    assert session.feed([], prompt_logprobs=entries[4:]) is None
    output = session.feed(ids("x"))
    assert output is not None and output.prompt_logprobs is not None
    assert output.prompt_logprobs[:first] == [None] * first and len(output.prompt_logprobs) == 5
    assert [next(iter(p.values())).logprob for p in output.prompt_logprobs if p] == [
        -float(i) for i in range(first, 5)
    ]
    later = session.feed(ids("y"), finish_reason="length")
    assert later is not None and later.prompt_logprobs is None  # a delta gives them once


def test_the_receipt() -> None:
    session = Session(FINAL_ONLY)
    output = session.feed(ids("ab"), finish_reason="length", timeline=timeline(3.0, 4.5))
    assert output is not None and output.timeline[0] == ("QUEUED", 1.0, "")
    assert output.metrics == RequestMetrics(
        arrival_time=0.5,
        first_scheduled_time=2.0,
        first_token_time=3.0,
        last_token_time=4.5,
        finished_time=4.5,
        num_preemptions=0,
        token_times=[[3.0, 4.5]],
    )
    assert output.metrics.time_in_queue == 1.5


def test_end_from_this_side() -> None:
    session = Session(DELTA, n=2, stop=["zz"])
    session.feed(ids("az"), 0)
    session.feed(ids("b"), 1, finish_reason="length")
    output = session.processor.end("r", "error", "the engine died")
    assert output is not None and output.finished
    assert [(a.text, a.finish_reason, a.error) for a in output.outputs] == [("z", "error", "the engine died")]
    assert session.processor.end("r", "error") is None
    assert session.feed(ids("late")) is None  # news of a forgotten request


def pieces(tokens: list[int], rng: random.Random) -> Iterator[list[int]]:
    start = 0
    while start < len(tokens):
        end = start + rng.randint(1, 4)
        yield tokens[start:end]
        start = end


@pytest.mark.parametrize("seed", range(30))
def test_however_tokens_arrive_the_answer_is_the_same(seed: int) -> None:
    """Deltas joined, the last cumulative output and the final output agree, with stop strings and without."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab é🎉x") for _ in range(40))
    stop = ["".join(rng.choice("ab é") for _ in range(3))] if seed % 2 else []
    expected = text[: text.find(stop[0])] if stop and stop[0] in text else text
    tokens = ids(text)
    sessions = {kind: Session(kind, stop=stop) for kind in RequestOutputKind}
    for kind, session in sessions.items():
        chunks = list(pieces(tokens, random.Random(f"{seed}{kind}")))
        for index, chunk in enumerate(chunks):
            if not session.stopped:
                session.feed(chunk, finish_reason="length" if index == len(chunks) - 1 else None)
    assert "".join(sessions[DELTA].texts()) == expected
    assert sessions[CUMULATIVE].texts()[-1] == expected
    assert sessions[FINAL_ONLY].texts() == [expected]
