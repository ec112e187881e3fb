"""Programs in process, over a model that says what it is asked to."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace import lang
from headrace.errors import RequestError
from headrace.lang import Backend, State
from headrace.lang.trace import shared_beginning
from tests.lang.oracle import LocalOracle


@lang.program
def talk(s: State, first: str, second: str) -> None:
    s += lang.system("Be brief.")
    s += lang.user(f"SAY:{first}")
    s += lang.assistant("Well: ", lang.gen("first"))
    s += lang.user("SAY:" + second)
    s += lang.assistant(lang.gen("second", max_tokens=3) + "!")


@lang.program
def plain(s: State, words: str) -> str:
    s += f"SAY:{words}\n" + lang.gen("out", stop=" three") + " end"
    return s["out"].upper()


def test_roles_and_variables(model: Backend) -> None:
    state = talk.run(model, first="one", second="1, 2, 3")
    assert state["first"] == "one" and state["second"] == "1, "
    assert [message["role"] for message in state.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert state.messages[2]["content"] == "Well: one" and state.messages[4]["content"] == "1, !"
    assert state.meta("second") == {"finish_reason": "length", "num_tokens": 3}
    assert state.meta("first")["finish_reason"] == "stop" and "first" in state
    with pytest.raises(RequestError, match="'third'"):
        state["third"]


def test_plain_text_stop_and_returned_values(model: Backend) -> None:
    state = plain.run(model, words="one two three four")
    assert state["out"] == "one two" and state["return"] == "ONE TWO"
    assert state.text == "SAY:one two three four\none two end"


def test_the_prompt_goes_on_in_the_middle_of_a_turn(oracle: LocalOracle) -> None:
    oracle.core.prompts.clear()
    talk.run(oracle.backend, first="x", second="y")
    first, second = oracle.core.prompts
    assert first.endswith(("<|im_start|>assistant\nWell:", "<|im_start|>assistant\nWell: "))
    assert second.endswith("<|im_start|>assistant\n") and "Well: x<|im_end|>" in second


def test_select_takes_the_likeliest_choice_per_token(oracle: LocalOracle) -> None:
    @lang.program
    def judge(s: State, choices: list[str]) -> None:
        s += "The film is " + lang.select("verdict", choices)

    choices = ["bad", "a waste of a very long evening", "good"]
    state = judge.run(oracle.backend, choices=choices)
    assert state["verdict"] == "good" and state.text == "The film is good"
    scores = state.meta("verdict")["scores"]
    assert list(scores) == choices and scores["good"] > max(scores["bad"], scores[choices[1]])
    tokenizer, core = oracle.core.tokenizer, oracle.core
    for choice in choices:
        ids = tokenizer.encode("The film is " + choice)
        context = tokenizer.encode("The film is ")
        shared = next((i for i, (a, b) in enumerate(zip(ids, context, strict=False)) if a != b), len(context))
        values = [core.logprob(ids[i - 1], ids[i]) for i in range(shared, len(ids))]
        assert scores[choice] == pytest.approx(sum(values) / len(values))


def test_one_choice_may_begin_another(model: Backend) -> None:
    @lang.program
    def pick(s: State) -> None:
        s += lang.user("x") + lang.assistant(lang.select("y", ["no", "no, never", "no, never again"]))

    state = pick.run(model)
    assert state["y"] in state.meta("y")["scores"] and len(state.meta("y")["scores"]) == 3


def test_forks_run_at_once_and_join(oracle: LocalOracle) -> None:
    @lang.program
    def tree(s: State) -> None:
        s += "Tips.\n"
        s += "SAY:root\n" + lang.gen("root")
        forks = s.fork(4)
        s += " later"
        for index, other in enumerate(forks):
            other += f"\nSAY:leaf {index} " + "word " * 30 + "\n" + lang.gen("leaf")
        leaves = s.join(forks)
        s.set("leaves", [leaf["leaf"][:6] for leaf in leaves])
        s.set("roots", {leaf["root"] for leaf in leaves})

    oracle.core.most_at_once = 0
    state = tree.run(oracle.backend)
    assert state["leaves"] == ["leaf 0", "leaf 1", "leaf 2", "leaf 3"] and state["roots"] == {"root"}
    assert state.text == "Tips.\nSAY:root\nroot later"
    assert oracle.core.most_at_once == 4


def test_join_can_append_what_forks_wrote(model: Backend) -> None:
    @lang.program
    def lines(s: State) -> None:
        s += "Poem:"
        forks = s.fork(2)
        for index, other in enumerate(forks):
            other += f"\nSAY:line {index}\n" + lang.gen("line")
        s.join(forks, append=True)

    assert lines.run(model).text == "Poem:\nSAY:line 0\nline 0\nSAY:line 1\nline 1"


def test_messages_of_forks_are_not_dropped_in_silence(model: Backend) -> None:
    @lang.program
    def asks(s: State) -> None:
        s += lang.user("SAY:x")
        s.join(s.fork(2), append=True)

    with pytest.raises(RequestError, match="roles"):
        asks.run(model)


def test_batch_keeps_order_and_runs_at_once(oracle: LocalOracle) -> None:
    oracle.core.most_at_once = 0
    words = [f"number {n} " + "and more " * 20 for n in range(12)]
    states = plain.run_batch(oracle.backend, [{"words": word} for word in words])
    assert [state["out"] for state in states] == words
    assert oracle.core.most_at_once > 4
    assert plain.run_batch(oracle.backend, []) == []


def test_stream_tells_pieces_as_they_come(model: Backend) -> None:
    pieces = list(talk.stream(model, first="one two three", second="four"))
    assert "".join(text for name, text in pieces if name == "first") == "one two three"
    assert [name for name, _ in pieces] == sorted(name for name, _ in pieces)
    assert len(pieces) > 2


def test_errors_end_a_run_and_are_raised(model: Backend) -> None:
    @lang.program
    def bad(s: State) -> None:
        s += "x" + lang.gen("y", temperature=-1)
        s += lang.gen("z")

    with pytest.raises(RequestError, match="temperature"):
        bad.run(model)
    with pytest.raises(RequestError, match="temperature"):
        list(bad.stream(model))
    with pytest.raises(RequestError, match="temperature"):
        bad.run_batch(model, [{}, {}])

    @lang.program
    def raises(s: State) -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        raises.run(model)
    assert plain.run(model, words="still alive")["out"] == "still alive"


@pytest.mark.parametrize(
    "make",
    [
        lambda: lang.gen(""), lambda: lang.gen("x", regex="a", json={}), lambda: lang.select("x", []),
        lambda: lang.select("x", ["a", "a"]), lambda: lang.select("x", "ab"), lambda: lang.select("x", [""]),
        lambda: lang.user(lang.gen("x")), lambda: lang.system(lang.user("x")), lambda: lang.user(5),
        lambda: lang.select("x", None), lambda: lang.gen("x", stop=5), lambda: lang.gen("x", stop=""),  # type: ignore
        lambda: lang.gen("x", max_tokens=0), lambda: lang.gen("x", max_tokens="5"), lambda: lang.gen("x", seed=0.5),  # type: ignore
        lambda: lang.gen("x", temperature=float("nan")), lambda: lang.gen("x", json=int),  # type: ignore
        lambda: lang.gen("x", regex=""),
        lambda: lang.gen("x", choices="abc"), lambda: lang.gen("x", choices=[]), lambda: lang.gen("x", choices=[1]),  # type: ignore
    ],
)  # fmt: skip
def test_mistakes_in_pieces_are_told_at_once(make: Any) -> None:
    with pytest.raises(RequestError):
        make()


def test_mistakes_in_the_order_of_pieces(model: Backend) -> None:
    @lang.program
    def mixed(s: State) -> None:
        s += "text"
        s += lang.user("x")

    @lang.program
    def between(s: State) -> None:
        s += lang.user("x") + "text"

    for program in (mixed, between):
        with pytest.raises(RequestError, match="role"):
            program.run(model)


def test_tools_are_plain_python(model: Backend) -> None:
    @lang.program
    def agent(s: State) -> int:
        total = 0
        for number in ("3", "4", "stop"):
            s += lang.user(f"SAY:{number}")
            s += lang.assistant(lang.gen("action"))
            if s["action"] == "stop":
                break
            total += int(s["action"])
        return total

    assert agent.run(model)["return"] == 7


def test_programs_are_parts_of_programs(model: Backend) -> None:
    @lang.program
    def outer(s: State) -> None:
        talk(s, first="a", second="b")
        s += lang.user("SAY:c") + lang.assistant(lang.gen("third"))

    state = outer.run(model)
    assert (state["first"], state["second"], state["third"]) == ("a", "b", "c")


def test_tracing_finds_what_runs_share() -> None:
    batch = [{"first": "one", "second": "same"}, {"first": "two", "second": "same"}]
    shared = shared_beginning(talk._function, batch)
    assert shared.messages == (("system", "Be brief."), ("user", "SAY:"))

    def shots(s: State, examples: list[str], question: str) -> None:
        for example in examples:
            s += example.strip() + "\n"
        s += "Q: " + question.upper().strip() + lang.gen("a")
        time.sleep(60)  # never reached

    own = [{"examples": [" a ", "b"], "question": "x"}, {"examples": [" a ", "b"], "question": "y"}]
    assert shared_beginning(shots, own).text == "a\nb\nQ: "
    assert shared_beginning(shots, [own[0], {"examples": ["c"], "question": "x"}]).text == ""


def test_the_shared_beginning_is_computed_once_and_first(oracle: LocalOracle) -> None:
    oracle.core.prompts.clear()
    talk.run_batch(oracle.backend, [{"first": str(n), "second": "x"} for n in range(3)])
    assert oracle.core.prompts[0].endswith("SAY:")
    oracle.core.prompts.clear()
    talk.run_batch(oracle.backend, [{"first": str(n), "second": "x"} for n in range(3)], cache_prefix=False)
    assert len(oracle.core.prompts) == 6
