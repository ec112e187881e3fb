"""Constrained requests through the engine core, over a made-up model and a real grammar library."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from headrace.core.request import Request
from headrace.engine.constraints import Constraints
from headrace.errors import GrammarError
from headrace.grammar.base import TokenVocabulary
from headrace.grammar.llguidance_backend import LLGuidanceBackend
from headrace.structured_outputs import Constraint, StructuredOutputsParams
from tests.engine.core_harness import CoreHarness, next_token
from tests.grammar.small_vocabulary import END, bits, decode, small_vocabulary

PROMPT = list(range(1, 23))
INNER = {
    "type": "object",
    "properties": {"abc": {"type": "boolean"}},
    "required": ["abc"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "ab": {"enum": ["true", "null", "ace"]},
        "bc": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 120}, "maxItems": 3},
        "a": INNER,
        "d": {"type": "string", "maxLength": 6},
    },
    "required": ["ab", "bc", "a", "d"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "person": {"json": PERSON},
    "compact": {"json": PERSON, "disable_any_whitespace": True},
    "choice": {"choice": ["ab", "abc", "tru"]},
    "single": {"choice": ["abcabc"]},
    "regex": {"regex": "(abc|abd){1,9}(tr?)*"},
    "free": {"json_object": True},
    "grammar": {"grammar": 'start: "a" start "b" | "c" "d"? '},
}


def constraint(name: str) -> Constraint:
    return StructuredOutputsParams(**KINDS[name]).to_constraint()


BACKEND = LLGuidanceBackend(small_vocabulary())
GRAMMARS = {name: BACKEND.compile(constraint(name)) for name in KINDS}


def harness(*, jump_forward: bool = True, **options: Any) -> CoreHarness:
    return CoreHarness(mask_source=Constraints(small_vocabulary, jump_forward=jump_forward), **options)


def expected(name: str, prompt: list[int], max_tokens: int, child: int = 0) -> tuple[list[int], str]:
    """One token at a time, each the made-up model's choice within its mask; forced ones as they are spelled."""
    matcher, tokens, forced = GRAMMARS[name].matcher.copy(), list(prompt), []
    mask = np.zeros((1, 2), np.uint32)
    while True:
        forced = forced or matcher.forced_tokens()
        matcher.fill_mask(mask, 0)
        allowed = np.array(bits(mask[0]))
        wanted = next_token(tokens, child)
        token = forced[0] if forced else int(allowed[np.searchsorted(allowed, wanted) % len(allowed)])
        forced = forced[1:]
        tokens.append(token)
        if token == END:
            return tokens[len(prompt) :], "stop"
        assert matcher.accept([token])
        if len(tokens) - len(prompt) == max_tokens:
            return tokens[len(prompt) :], "length"
        if matcher.is_complete():
            return tokens[len(prompt) :], "stop"


def add(
    core: CoreHarness, name: str, kind: str, prompt: list[int], max_tokens: int = 60, **options: Any
) -> None:
    core.add(name, prompt, max_tokens, constraint=constraint(kind), eos_token_ids=[END], **options)


def check(core: CoreHarness, name: str, kind: str, child: int = 0) -> None:
    request, answer = core.requests[name], core.answers[(name, child)]
    wanted = expected(kind, request.prompt_token_ids, request.max_tokens, child)
    assert (answer.token_ids, answer.finish_reason) == wanted, (name, kind, decode(answer.token_ids))


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize("steps_outstanding", [1, 2, 3, 4])
def test_every_kind_beside_free_requests(steps_outstanding: int, jump_forward: bool) -> None:
    core = harness(max_steps_outstanding=steps_outstanding, lag=1, num_blocks=200, jump_forward=jump_forward)
    for index, kind in enumerate(KINDS):
        add(core, f"{kind}-0", kind, PROMPT[index:])
        add(core, f"{kind}-1", kind, PROMPT[: 5 + index], 7)
        core.add(f"plain-{index}", PROMPT[: 9 + index], 20)
    core.run()
    for kind in KINDS:
        check(core, f"{kind}-0", kind)
        check(core, f"{kind}-1", kind)
    core.answers = {key: answer for key, answer in core.answers.items() if key[0].startswith("plain")}
    core.check_answers()
    stats = core.core.stats()
    assert stats.num_constraint_violations == 0 and (stats.num_forced_tokens > 0) is jump_forward
    person = json.loads(decode(expected("person", PROMPT, 60)[0]))
    assert set(person) == set(PERSON["properties"])


@pytest.mark.parametrize("steps_outstanding", [1, 2])
def test_jump_forward_saves_steps_and_changes_no_token(steps_outstanding: int) -> None:
    steps = {}
    for jump_forward in (True, False):
        core = harness(max_steps_outstanding=steps_outstanding, lag=1, jump_forward=jump_forward)
        add(core, "r", "compact", PROMPT)
        core.run()
        check(core, "r", "compact")
        steps[jump_forward] = core.core.stats().num_steps
    assert steps[True] < 0.7 * steps[False], steps


@pytest.mark.parametrize("steps_outstanding", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_children_have_matchers_of_their_own(steps_outstanding: int, prefix_caching: bool) -> None:
    core = harness(
        max_steps_outstanding=steps_outstanding, lag=1, num_blocks=200, prefix_caching=prefix_caching
    )
    add(core, "r", "person", PROMPT, n=3)
    add(core, "s", "choice", PROMPT[:7], n=2)
    core.run()
    for child in range(3):
        check(core, "r", "person", child)
    for child in range(2):
        check(core, "s", "choice", child)
    assert len({tuple(core.answers[("r", child)].token_ids) for child in range(3)}) == 3


@pytest.mark.parametrize("steps_outstanding", [1, 2, 3])
def test_preempted_requests_go_on_where_they_were(steps_outstanding: int) -> None:
    core = harness(max_steps_outstanding=steps_outstanding, lag=1, num_blocks=26, policy="priority")
    for index in range(6):
        add(
            core,
            f"r{index}",
            "person" if index % 2 else "compact",
            PROMPT[index : index + 9],
            priority=6 - index,
        )
        while len(core.answers[(f"r{index}", 0)].token_ids) < 8:
            core.step()
    core.run()
    for index in range(6):
        check(core, f"r{index}", "person" if index % 2 else "compact")
    assert core.core.stats().num_preemptions > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_limit_cuts_it_and_says_so(max_tokens: int) -> None:
    core = harness(max_steps_outstanding=2, lag=1)
    for kind in KINDS:
        add(core, kind, kind, PROMPT, max_tokens)
    core.run()
    for kind in KINDS:
        check(core, kind, kind)


@pytest.mark.parametrize("max_tokens", [1, 7, 40])
@pytest.mark.parametrize("text", ['start: "a" start', 'start: "abc" start'])
def test_a_forced_text_without_an_end_harms_nobody_else(text: str, max_tokens: int) -> None:
    core = harness(max_steps_outstanding=2, lag=1)
    endless = StructuredOutputsParams(grammar=text).to_constraint()
    core.add("endless", PROMPT, max_tokens, constraint=endless, eos_token_ids=[END])
    add(core, "other", "person", PROMPT)
    core.run()
    answer = core.answers[("endless", 0)]
    assert answer.finish_reason in ("length", "error") and len(answer.token_ids) <= max_tokens
    check(core, "other", "person")


def test_only_prompt_tokens_count_as_cached() -> None:
    """Tokens that are forced before the first step are looked up, too."""
    core = harness()
    for name in ("first", "second"):
        add(core, name, "compact", PROMPT)
        core.run()
    assert core.kv.stats().num_hit_tokens >= len(PROMPT)
    assert core.answers[("second", 0)].num_cached_tokens == len(PROMPT)


def test_a_whole_answer_that_is_forced_needs_no_step() -> None:
    core = harness()
    add(core, "r", "single", PROMPT)
    core.run()
    check(core, "r", "single")
    assert core.core.stats().num_steps == 0


def test_logprobs_and_forbidden_tokens_are_sampled_one_by_one() -> None:
    core = harness(max_steps_outstanding=2, lag=1)
    add(core, "r", "compact", PROMPT, logprobs=1)
    add(core, "s", "compact", PROMPT, bad_word_ids=[[3, 4]])
    add(core, "p", "single", PROMPT, prompt_logprobs=1)
    core.run()
    for name in ("r", "s"):
        check(core, name, "compact")
    check(core, "p", "single")
    assert core.core.stats().num_steps > len(core.answers[("r", 0)].token_ids)


def test_stop_tokens_count_only_where_the_text_may_end_and_ignore_eos_goes_on() -> None:
    core = harness()
    vocabulary = small_vocabulary()
    quote, b = vocabulary.encode('"')[0], vocabulary.encode("b")[0]
    add(core, "json", "person", PROMPT, stop_token_ids=[quote])
    core.add(
        "regex",
        PROMPT,
        40,
        constraint=StructuredOutputsParams(regex="ab*c*").to_constraint(),
        stop_token_ids=[b],
    )
    options = {"eos_token_ids": [END], "ignore_eos": True}
    core.add("more", PROMPT, 30, constraint=StructuredOutputsParams(regex="ab*").to_constraint(), **options)
    core.add("once", PROMPT, 30, constraint=StructuredOutputsParams(regex="ab{3}").to_constraint(), **options)
    core.run()
    assert (
        json.loads(decode(core.answers[("json", 0)].token_ids))
        and core.answers[("json", 0)].finish_reason == "stop"
    )
    regex, more, once = (core.answers[(name, 0)] for name in ("regex", "more", "once"))
    assert regex.finish_reason in ("stop", "length") and decode(regex.token_ids).startswith("a")
    assert b not in regex.token_ids[:-1] or regex.token_ids[-1] == b
    assert more.finish_reason == "length" and set(decode(more.token_ids)) == {"a", "b"}
    assert once.finish_reason == "stop" and decode(once.token_ids) == "abbb"


class Gate:
    """A vocabulary that is loaded only when it is let through."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> TokenVocabulary:
        self.event.wait(10)
        return small_vocabulary()


def test_nobody_waits_for_a_grammar_but_its_own_requests() -> None:
    gate = Gate()
    core = CoreHarness(mask_source=Constraints(gate), max_steps_outstanding=2, lag=1)
    add(core, "r", "person", PROMPT, n=2)
    core.add("free", PROMPT, 8)
    while core.answers[("free", 0)].finish_reason is None:
        core.step()
    requests = core.core._families["r"]
    assert [request.status.name for request in requests] == ["PREPARING", "PREPARING"]
    assert core.step() == [] and core.core.has_work()
    gate.event.set()
    core.run()
    check(core, "r", "person", 0)
    check(core, "r", "person", 1)


@pytest.mark.parametrize("index", range(2))
def test_what_cannot_be_compiled_is_a_refusal_of_that_request_alone(index: int) -> None:
    core = harness()
    wrong = [{"regex": "a(?=b)"}, {"json": {"type": "strin"}}][index]
    core.add("bad", PROMPT, 8, constraint=StructuredOutputsParams(**wrong).to_constraint(), n=2)
    add(core, "good", "choice", PROMPT)
    news = []
    while core.core.has_work():
        news += core.step()
    refused = [item for item in news if item.refusal is not None]
    assert [item.child_index for item in refused] == [0, 1]
    assert all(item.finish_reason == "error" and item.refusal.kind == "GrammarError" for item in refused)
    assert refused[0].refusal.param == f"structured_outputs.{next(iter(wrong))}" and refused[0].message
    check(core, "good", "choice")
    core.assert_nothing_held()


def test_compiling_that_takes_too_long_is_refused() -> None:
    gate = Gate()
    core = CoreHarness(mask_source=Constraints(gate, max_compile_s=0.05))
    add(core, "r", "person", PROMPT)
    started = time.monotonic()
    core.run()
    gate.event.set()
    assert time.monotonic() - started < 5
    assert (
        core.answers[("r", 0)].finish_reason == "error"
        and "max_grammar_compile_s" in core.answers[("r", 0)].message
    )


def test_cancelled_while_compiling_and_while_running() -> None:
    gate = Gate()
    core = CoreHarness(mask_source=Constraints(gate), max_steps_outstanding=2, lag=1)
    add(core, "early", "person", PROMPT, n=2)
    core.step()
    core.core.abort_requests(["early"])
    gate.event.set()
    add(core, "late", "person", PROMPT)
    for _ in range(40):
        core.step()
        if len(core.answers[("late", 0)].token_ids) > 3:
            break
    core.core.abort_requests(["late"])
    core.run()
    assert core.answers[("early", 1)].finish_reason == core.answers[("late", 0)].finish_reason == "abort"


def test_a_constraint_is_compiled_once() -> None:
    source = Constraints(small_vocabulary)
    core = CoreHarness(mask_source=source)
    for index in range(4):
        add(core, f"r{index}", "person", PROMPT)
    core.run()
    assert source.compiler.num_compiled == 1


def test_an_engine_without_grammars_refuses_them() -> None:
    core = CoreHarness()
    with pytest.raises(GrammarError, match="structured_outputs"):
        add(core, "r", "person", PROMPT)
    assert not core.core.has_work()


def test_tokens_are_told_only_while_some_request_is_constrained(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Constraints(small_vocabulary)
    core = CoreHarness(mask_source=source)
    told: list[str] = []
    accept = source.accept

    def noted(request: Request, token_ids: list[int]) -> Any:
        told.append(request.request_id)
        return accept(request, token_ids)

    monkeypatch.setattr(source, "accept", noted)
    core.add("alone", PROMPT, 6)
    core.run()
    assert source.is_idle and not told
    add(core, "bound", "regex", PROMPT)
    core.add("beside", PROMPT, 6)
    assert not source.is_idle
    core.run()
    check(core, "bound", "regex")
    assert source.is_idle and "bound" in told
