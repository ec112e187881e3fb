"""However a text is cut into pieces, its events are the same: every format, every split, sound and broken texts."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serve.tools.events import Content, ParsedAnswer, ParseFailure, Reasoning
from headrace.serve.tools.registry import FORMATS
from tests.serve.tools.answers import REASONED, TEXTS, answer, reader

CASES = [(form, text) for form, texts in TEXTS.items() for text in texts]


@pytest.mark.parametrize(("form", "text"), CASES)
def test_every_split_in_two_and_into_characters(form: str, text: str) -> None:
    read = reader(form)
    whole = read([text])
    assert read(list(text)) == whole
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == whole, cut


@pytest.mark.parametrize(("form", "text"), [(form, texts[0][:40]) for form, texts in TEXTS.items()])
def test_every_split_in_three(form: str, text: str) -> None:
    read = reader(form, is_cut=True)
    whole = read([text])
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert read([text[:first], text[first:second], text[second:]]) == whole, (first, second)


@pytest.mark.parametrize("reasoned", REASONED)
@pytest.mark.parametrize("inside", [False, True])
def test_every_split_with_reasoning(reasoned: str, inside: bool) -> None:
    text = reasoned.replace("{}", TEXTS["hermes"][1])
    read = reader("hermes", "think", inside=inside)
    whole = read([text])
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == whole, cut


@pytest.mark.parametrize(("form", "text"), CASES)
@pytest.mark.parametrize("is_cut", [False, True])
def test_every_prefix(form: str, text: str, is_cut: bool) -> None:
    """An answer may end anywhere; no text is lost and no call is complete that is not."""
    read = reader(form, is_cut=is_cut)
    for end in range(len(text)):
        events = read([text[:end]])
        assert read(list(text[:end])) == events
        check_sound(text[:end], answer(events), is_cut)


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.frame("f") is not None])
@pytest.mark.parametrize("max_calls", [None, 1])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_required_call_that_is_cut_is_never_content(form: str, max_calls: int | None, is_cut: bool) -> None:
    """Markup that did not become a call is dropped; the part of a call that is known stays."""
    calls = [("get_weather", {"city": "Paris <b>"}), ("get_time", {"zone": [1, None]})]
    text = "\n" + FORMATS[form].render(calls)
    for tags in (None, "think"):
        read = reader(form, tags, is_cut, max_calls, only_calls=True)
        free = reader(form, tags, is_cut, max_calls)
        for end in range(len(text) + 1):
            events = read([text[:end]])
            assert read(list(text[:end])) == events
            assert not any(isinstance(event, Content) for event in events), text[:end]
            assert answer(events).calls == answer(free([text[:end]])).calls


def check_sound(text: str, parsed: ParsedAnswer, is_cut: bool) -> None:
    for call in parsed.calls:
        if call.is_complete:
            assert isinstance(json.loads(call.arguments), dict)
        else:
            with pytest.raises(ValueError):
                json.loads(call.arguments)
    if not parsed.calls:
        assert parsed.content.strip() == text.strip()  # never silence
    if not is_cut:
        num_failed = sum(failure.index is not None for failure in parsed.failures)
        assert num_failed == sum(not call.is_complete for call in parsed.calls)


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, str, list[int]]:
    """A format, a text of it with characters dropped, doubled, swapped or put in, and where to cut it."""
    form = draw(st.sampled_from(list(TEXTS)))
    text = draw(st.sampled_from(TEXTS[form]))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        kind = draw(st.sampled_from(["drop", "put", "double", "cut", "paste"]))
        size = draw(st.integers(1, 8))
        if kind == "drop":
            text = text[:at] + text[at + size :]
        elif kind == "put":
            text = (
                text[:at]
                + draw(st.text(st.sampled_from("{}[]()\"',:<>|\\\n tné\U0001f600`/"), max_size=4))
                + text[at:]
            )
        elif kind == "double":
            text = text[: at + size] + text[at:]
        elif kind == "cut":
            text = text[:at] or text
        else:
            other = draw(st.sampled_from(TEXTS[draw(st.sampled_from(list(TEXTS)))]))
            text = text[:at] + other[: draw(st.integers(1, len(other)))] + text[at:]
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=8))
    return form, text, sorted(cuts)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(broken(), st.booleans(), st.sampled_from([None, 1, 2]), st.sampled_from([None, "think", "mistral"]))
def test_broken_texts_in_any_pieces(
    case: tuple[str, str, list[int]], is_cut: bool, max_calls: int | None, tags: str | None
) -> None:
    form, text, cuts = case
    read = reader(form, tags, is_cut, max_calls)
    whole = read([text])
    edges = [0, *cuts, len(text)]
    assert read([text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert read(list(text)) == whole
    parsed = answer(whole)
    if tags is None:
        check_sound(text, parsed, is_cut)
    assert all(not isinstance(e, ParseFailure) or e.message for e in whole)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(list(FORMATS)), st.text(max_size=60), st.data())
def test_any_text_is_content(form: str, text: str, data: st.DataObject) -> None:
    """Text without a mark of the format comes out as it went in."""
    events = reader(form)(list(text))
    assert "".join(e.text for e in events if isinstance(e, Content)) == text
    assert not any(isinstance(e, Reasoning) for e in events)
