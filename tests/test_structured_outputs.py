from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from headrace.core.output import EngineCoreRequest
from headrace.engine.input_processor import InputProcessor
from headrace.errors import GrammarError, RequestError
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import MAX_CONSTRAINT_BYTES, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"größe": {"const": 10**30}, "a": {}}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


CIRCLE: dict[str, Any] = {}
CIRCLE["items"] = CIRCLE

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "structured_outputs"),
    ({"json_object": False}, "structured_outputs"),
    ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
    ({"json": {}, "json_object": True}, "structured_outputs"),
    ({"json": "{"}, "structured_outputs.json"),
    ({"json": "[]"}, "structured_outputs.json"),
    ({"json": "5"}, "structured_outputs.json"),
    ({"json": 5}, "structured_outputs.json"),
    ({"json": {"const": float("nan")}}, "structured_outputs.json"),
    ({"json": {"const": b"x"}}, "structured_outputs.json"),
    ({"json": CIRCLE}, "structured_outputs.json"),
    ({"json": '{"items":' * 100_000 + "}" * 100_000}, "structured_outputs.json"),
    ({"json": {"const": "x" * MAX_CONSTRAINT_BYTES}}, "structured_outputs.json"),
    ({"json": '{"const": "\\ud800"}'}, "structured_outputs.json"),
    ({"regex": "\ud800"}, "structured_outputs.regex"),
    ({"regex": ""}, "structured_outputs.regex"),
    ({"regex": 5}, "structured_outputs.regex"),
    ({"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)}, "structured_outputs.regex"),
    ({"grammar": ""}, "structured_outputs.grammar"),
    ({"grammar": {}}, "structured_outputs.grammar"),
    ({"choice": []}, "structured_outputs.choice"),
    ({"choice": "abc"}, "structured_outputs.choice"),
    ({"choice": ["a", ""]}, "structured_outputs.choice"),
    ({"choice": ["a", 5]}, "structured_outputs.choice"),
    ({"choice": ["a"] * 10_001}, "structured_outputs.choice"),
    ({"json_object": "yes"}, "structured_outputs.json_object"),
    ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
    ({"structural_tag": True}, "structured_outputs.structural_tag"),
    ({"structural_tag": [1]}, "structured_outputs.structural_tag"),
    ({"regex": "a", "backend": "outlines"}, "structured_outputs.backend"),
    ({"regex": "a", "disable_any_whitespace": "no"}, "structured_outputs.disable_any_whitespace"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_values_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param.split(".")[-1]) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == param and len(str(caught.value)) < 300


def test_what_cannot_be_read_is_a_grammar_error_with_a_code() -> None:
    with pytest.raises(GrammarError) as caught:
        StructuredOutputsParams(json='{"items":' * 100_000 + "}" * 100_000)
    assert caught.value.code == "constraint_too_deep"
    with pytest.raises(GrammarError) as caught:
        StructuredOutputsParams(grammar="a" * (MAX_CONSTRAINT_BYTES + 1))
    assert caught.value.code == "constraint_too_large"


def test_a_schema_as_text_and_as_a_dict_is_the_same_constraint_and_keeps_its_order() -> None:
    one = StructuredOutputsParams(json=SCHEMA).to_constraint()
    other = StructuredOutputsParams(json=json.dumps(SCHEMA, indent=2)).to_constraint()
    assert one == other and hash(one) == hash(other)
    assert list(json.loads(one.text)["properties"]) == ["größe", "a"]
    assert one.backend == "llguidance" and not one.is_compact


def test_true_and_false_are_schemas() -> None:
    assert StructuredOutputsParams(json=True).to_constraint().text == "true"
    assert StructuredOutputsParams(json="false").to_constraint().text == "false"


def test_it_is_checked_again_on_a_copy() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    assert params.structured_outputs is not None
    params.structured_outputs.choice = []
    with pytest.raises(RequestError, match="choice"):
        params.clone()


def test_it_travels_to_the_core_outside_of_the_sampling_parameters() -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    )
    request = (
        InputProcessor(vocab_size=10, max_model_len=9, tokenizer=Mock())
        .process("r", {"prompt_token_ids": [1]}, params)
        .request
    )
    assert params.structured_outputs is not None and request.sampling_params.structured_outputs is None
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest)
    assert back.constraint is not None and back.constraint.is_compact
    assert json.loads(back.constraint.source) == SCHEMA and "const" not in back.constraint.text
