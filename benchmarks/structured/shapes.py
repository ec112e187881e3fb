"""Constraints to measure with, and an engine core to drive by hand."""

from __future__ import annotations

import time
from typing import Any

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.engine_core import EngineCore
from headrace.grammar.constraint_text import prepare
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import Constraint, StructuredOutputsParams

# A character sheet in SGLang's manner: 8 top-level keys, one of them an object of 3; four enums, strings of at most 16
# characters, one decimal.
_TEXT = r'"[\w\d\s]{1,16}"'
CHARACTER_SHEET = (
    r"\{\n"
    rf'    "name": {_TEXT},\n'
    r'    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "wand": \{\n'
    rf'        "wood": {_TEXT},\n'
    rf'        "core": {_TEXT},\n'
    r'        "length": [0-9]{1,2}\.[0-9]{0,2}\n'
    r"    \},\n"
    r'    "alive": "(Alive|Deceased)",\n'
    rf'    "patronus": {_TEXT},\n'
    rf'    "bogart": {_TEXT}\n'
    r"\}"
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "tool call": {
        "type": "object",
        "properties": {
            "name": {"enum": ["get_weather", "get_time", "search"]},
            "arguments": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 40},
                    "days": {"type": "integer", "minimum": 0, "maximum": 14},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
    "records": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "title": {"type": "string"},
                "date": {"type": "string", "format": "date"},
                "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z-]+$"}},
                "score": {"type": "number"},
            },
            "required": ["id", "title", "date", "tags", "score"],
            "additionalProperties": False,
        },
    },
    "map": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
}  # fmt: skip
DOCUMENTS: dict[str, str] = {
    "tool call": '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "records": '[{"id": 1, "title": "A first look at the mill", "date": "2024-02-29", "tags": ["water", "old-mill"], '
    '"score": 4.25}, {"id": 22, "title": "Größe und Gewicht", "date": "2023-11-01", "tags": [], "score": -1e3}]',
    "map": '{"alpha": 1, "beta": "two", "gamma ray": 3.5, "delta": "a longer text with words", "epsilon": -7}',
}


def constraint(**params: Any) -> Constraint:
    """A constraint as the engine takes it."""
    return prepare(StructuredOutputsParams(**params).to_constraint())[0]


def endless_list() -> Constraint:
    """A document that goes on for as long as anybody measures, with few forced tokens."""
    return constraint(json={"type": "array", "items": {"type": "string"}, "minItems": 100_000})


def run_batch(
    core: EngineCore,
    prompts: list[list[int]],
    max_tokens: int,
    wanted: Constraint | None,
    eos: list[int],
    serial: str,
) -> tuple[dict[str, list[int]], float, list[float]]:
    """(token ids by request, seconds, the times between tokens of each stream)."""
    for number, ids in enumerate(prompts):
        params = SamplingParams(
            temperature=0.7, seed=number, max_tokens=max_tokens, ignore_eos=wanted is None
        )
        request = EngineCoreRequest(
            f"{serial}-{number}", ids, params, max_tokens, eos_token_ids=eos, constraint=wanted
        )
        core.add_request(request)
    tokens: dict[str, list[int]] = {}
    gaps: list[float] = []
    last: dict[str, float] = {}
    started = time.perf_counter()
    while core.has_work():
        news, now = core.step(), time.perf_counter()
        for item in news:
            name = item.request_id.split("-", 1)[1]
            assert item.finish_reason != "error", item.message
            tokens.setdefault(name, []).extend(item.new_token_ids)
            if item.new_token_ids and name in last:
                gaps.append(now - last[name])
            if item.new_token_ids:
                last[name] = now
    return tokens, time.perf_counter() - started, gaps


def engine_config(model: str, options: list[str]) -> EngineConfig:
    """A configuration from KEY=VALUE words."""
    import yaml

    pairs = dict(option.split("=", 1) for option in options)
    return EngineConfig.from_options(
        model=model, **{key: yaml.safe_load(value) for key, value in pairs.items()}
    )
