from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from headrace.grammar.llguidance_backend import LLGuidanceBackend
from headrace.grammar.unique_names import JsonPlace, UniqueNamesMatcher, has_free_names
from headrace.structured_outputs import StructuredOutputsParams
from tests.grammar.small_vocabulary import END, TOKENS, bits, decode, encode, small_vocabulary

BACKEND = LLGuidanceBackend(small_vocabulary())


def after(text: str) -> JsonPlace | None:
    return JsonPlace().after(text.encode())


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"b":{"a":2}}', '[{"a":1},{"a":1}]', '{"a":"a","b":"a\\"a"}', '{"a":{"b":1,"c":[{"b":2}]},"b":3}',
     '{"":1,"a":2}', '{"a\\"":1,"a":2}', '["a","a"]', '{"a":[1,2,"a"],"b":"{\\"a\\":1,"}'],
)  # fmt: skip
def test_names_that_differ(text: str) -> None:
    json.loads(text)
    assert after(text) is not None and after(text).opened == ()


@pytest.mark.parametrize(
    "text", ['{"a":1,"a"', '{"a":{"b":1},"a"', '[{"b":1,"a":{},"b"', '{"":1,""', '{"a\\"":1, "a\\""']
)
def test_names_that_come_again(text: str) -> None:
    assert after(text) is None and after(text[:-1]) is not None


def random_text(params: dict[str, Any], seed: int) -> str | None:
    """A random answer within the masks; None if it got too long."""
    rng, mask = random.Random(seed), np.zeros((1, 2), np.uint32)
    matcher = BACKEND.compile(StructuredOutputsParams(**params).to_constraint()).matcher.copy()
    ids: list[int] = []
    while len(ids) < 150:
        matcher.fill_mask(mask, 0)
        # Short names from few letters, and many members: repetitions come at once.
        allowed = [
            t
            for t in bits(mask[0])
            if t == END or TOKENS[t] in (b'"', b"a", b"b", b",", b":", b"1", b"{", b"}", b'":', b'",', b'{"')
        ]
        token = rng.choice(allowed or bits(mask[0]))
        if token == END:
            break
        assert matcher.accept([token])
        ids.append(token)
        if matcher.is_complete():
            break
    return decode(ids) if matcher.is_finished() else None


@pytest.mark.parametrize(
    "params",
    [
        {"json_object": True},
        {"json": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 3}},
        {
            "json": {
                "type": "object",
                "patternProperties": {"^[ab]+$": {"enum": [1]}},
                "additionalProperties": False,
            }
        },
    ],
    ids=str,
)
def test_random_answers_have_no_name_twice(params: dict[str, Any]) -> None:
    sizes = []
    for seed in range(60):
        text = random_text(params, seed)
        if text is not None:
            pairs: list[list[Any]] = []
            json.loads(text, object_pairs_hook=pairs.append)
            assert all(len(dict(found)) == len(found) for found in pairs), text
            sizes.append(max(len(found) for found in pairs))
    assert len(sizes) > 5 and max(sizes) >= 2


def test_the_mask_loses_only_tokens_that_finish_the_name() -> None:
    matcher = BACKEND.compile(StructuredOutputsParams(json_object=True).to_constraint()).matcher.copy()
    assert isinstance(matcher, UniqueNamesMatcher)
    assert matcher.accept(encode('{"ab":1, "'))
    mask = np.zeros((1, 2), np.uint32)
    matcher.fill_mask(mask, 0)
    before = set(bits(mask[0]))
    assert matcher.accept(encode("ab"))
    matcher.fill_mask(mask, 0)
    after_name = set(bits(mask[0]))
    lost = {TOKENS[token] for token in before - after_name}
    assert b'"' in lost and b'":' in lost and b"a" not in lost
    matcher.rollback(1)
    other = matcher.copy()
    matcher.fill_mask(mask, 0)
    assert set(bits(mask[0])) == before and other.accept(encode("abc"))


@pytest.mark.parametrize(
    ("schema", "is_free"),
    [({}, True), ({"type": "object"}, True), ({"type": "integer"}, False), ({"type": "array"}, True),
     ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}, False),
     ({"type": "object", "properties": {"a": True}, "additionalProperties": False}, True),
     ({"type": "object", "patternProperties": {"a": {"type": "null"}}, "additionalProperties": False}, True),
     ({"type": "array", "items": {"$ref": "#/$defs/d0"}, "$defs": {"d0": {"type": "object"}}}, True),
     ({"anyOf": [{"type": "string"}, {"enum": [{"a": 1}]}]}, False)],
    ids=str,
)  # fmt: skip
def test_where_names_are_free(schema: dict[str, Any], is_free: bool) -> None:
    assert has_free_names(schema) is is_free
