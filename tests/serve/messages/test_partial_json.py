from __future__ import annotations

import json

import jiter
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serve.messages.partial_json import partial_object

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.data())
def test_every_beginning_is_what_the_official_client_makes_of_it(
    value: dict[str, object], data: st.DataObject
) -> None:
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    assert partial_object(text) == value
    for end in range(1, len(text)):
        assert partial_object(text[:end]) == jiter.from_json(text[:end].encode(), partial_mode=True)


def test_what_is_kept() -> None:
    assert partial_object('{"a": 1, "b": "two wo') == {"a": 1}
    assert partial_object('{"a": [1, {"b": [2, 3') == {"a": [1, {"b": [2, 3]}]}
    assert partial_object('{"a": "\\u00') == {}
    assert partial_object('{"a": 1, "b": tr') == {"a": 1}
    assert partial_object("") == {}
