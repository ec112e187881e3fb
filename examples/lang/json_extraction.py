"""JSON extraction: facts of many texts as documents of one schema.

python examples/lang/json_extraction.py [MODEL or http://server]
"""

from __future__ import annotations

import json
from typing import Any

from headrace import lang

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["person", "city", "river", "animal"]},
        "is_alive": {"type": "boolean"},
    },
    "required": ["name", "kind", "is_alive"],
    "additionalProperties": False,
}
TEXTS = [
    "The Danube flows through ten countries.",
    "Marie Curie discovered radium in Paris.",
    "Our cat Minka sleeps all day.",
    "Lisbon lies on seven hills.",
]


@lang.program
def extract(s: lang.State, text: str) -> None:
    s += lang.system("You extract facts as JSON with the fields name, kind and is_alive.")
    s += lang.user(f"Text: {text}")
    s += lang.assistant(lang.gen("facts", json=SCHEMA, max_tokens=120))


def run(model: lang.Backend) -> list[Any]:
    """The facts of each text."""
    states = extract.run_batch(model, [{"text": text} for text in TEXTS])
    return [json.loads(state["facts"]) for state in states]


if __name__ == "__main__":
    with lang.model_of_command_line() as model:
        for text, facts in zip(TEXTS, run(model), strict=True):
            print(f"{text} {facts}")
