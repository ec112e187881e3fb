"""The same programs over HTTP: against Headrace, and against a server that only has OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace import lang
from headrace.errors import EngineDeadError, RequestError
from headrace.lang import Backend, State
from headrace.lang.http_client import HttpClient
from headrace.lang.openai_server import OpenAIBackend
from tests.lang.test_programs import plain, talk
from tests.serve.launch import LaunchedServer


@lang.program
def mixed(s: State, word: str) -> None:
    s += lang.system("You judge.") + lang.user(f"SAY:{word}")
    s += lang.assistant(
        "It is ", lang.select("verdict", ["bad", "good", "so so"]), ". ", lang.gen("why", max_tokens=8)
    )
    forks = s.fork(2)
    for other in forks:
        other += lang.user("SAY:more") + lang.assistant(lang.gen("more"))
    s.set("mores", [found["more"] for found in s.join(forks)])


def test_a_server_computes_what_the_process_computes(model: Backend, remote: Backend) -> None:
    batch = [{"word": word} for word in ("one two", "Hello there", "1 2 3 4 5 6 7 8 9 10")]
    here = mixed.run_batch(model, batch)
    there = mixed.run_batch(remote, batch)
    assert [state.variables for state in here] == [state.variables for state in there]
    assert [state.text for state in here] == [state.text for state in there]
    for own, other in zip(here, there, strict=True):
        assert own.meta("verdict")["scores"] == pytest.approx(other.meta("verdict")["scores"])
        assert own.meta("why") == other.meta("why")


def test_streaming_and_stop_over_http(remote: Backend) -> None:
    pieces = list(talk.stream(remote, first="one two three", second="four"))
    assert "".join(text for name, text in pieces if name == "first") == "one two three"
    assert plain.run(remote, words="one two three four")["return"] == "ONE TWO"


def test_errors_of_a_server_are_the_same(remote: Backend) -> None:
    @lang.program
    def bad(s: State) -> None:
        s += "x" + lang.gen("y", temperature=-1)

    with pytest.raises(RequestError, match="temperature"):
        bad.run(remote)
    with pytest.raises(EngineDeadError):
        lang.connect("http://127.0.0.1:9")
    with pytest.raises(RequestError, match="address"):
        lang.connect("localhost")


def test_connect_names_what_is_served(lang_server: LaunchedServer) -> None:
    with pytest.raises(RequestError, match="smollm2"):
        lang.connect(lang_server.base, model="other")


@pytest.fixture
def foreign(lang_server: LaunchedServer) -> Iterator[Backend]:
    with OpenAIBackend(HttpClient(lang_server.base, "none"), "smollm2") as backend:
        yield backend


def test_a_foreign_server_does_what_its_api_can(foreign: Backend) -> None:
    @lang.program
    def simple(s: State, words: str) -> None:
        s += lang.user(f"SAY:{words}")
        s += lang.assistant(lang.gen("out", max_tokens=20))

    states = simple.run_batch(foreign, [{"words": "one"}, {"words": "two"}])
    assert [state["out"] for state in states] == ["one", "two"]
    assert "".join(text for _, text in simple.stream(foreign, words="a b c")) == "a b c"
    assert plain.run(foreign, words="one two three")["out"] == "one two"
    assert not foreign.is_exact


def test_what_a_foreign_server_cannot_do_is_told(foreign: Backend) -> None:
    @lang.program
    def pick(s: State, words: str) -> None:
        s += lang.user(f"SAY:{words}") + lang.assistant(lang.select("x", ["yes", "no"]))

    assert pick.run(foreign, words="no way")["x"] == "no"
    with pytest.raises(RequestError, match="begins like none"):
        pick.run(foreign, words="maybe")
    with pytest.raises(RequestError, match="middle of an assistant's turn"):
        talk.run(foreign, first="a", second="b")

    @lang.program
    def constrained(s: State) -> None:
        s += "x" + lang.gen("y", regex="a+")

    with pytest.raises(RequestError, match="regex"):
        constrained.run(foreign)
