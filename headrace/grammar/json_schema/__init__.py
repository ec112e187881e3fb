"""JSON Schemas brought to the words that grammar libraries enforce."""

from __future__ import annotations

from typing import Any

from headrace.errors import GrammarError
from headrace.grammar.json_schema.document import SchemaDocument, refuse
from headrace.grammar.json_schema.lowering import SchemaLowering
from headrace.grammar.json_schema.numbers import sound_numbers
from headrace.grammar.json_schema.productive import without_endless
from headrace.grammar.json_schema.self_reference import refuse_circles


def lower_schema(schema: Any) -> tuple[Any, list[str]]:
    """(an equivalent schema in fewer words, what the schema says and nobody enforces).

    Raises: GrammarError naming the path of what cannot be done.
    """
    if isinstance(schema, bool):
        lowered, notes = schema, []
    else:
        try:
            lowering = SchemaLowering(SchemaDocument(schema))
            lowered, notes = without_endless(lowering.lower()), lowering.notes
            if lowered is not False:
                refuse_circles(lowering.document, lowering.references)
                lowered = sound_numbers(lowered)
        except GrammarError:
            raise
        except RecursionError:
            refuse("#", "refers to itself too deeply to be compiled: make it flatter", "constraint_too_deep")
        except Exception as error:  # whatever an odd schema does to a library is no fault of the server
            problem = f"cannot be prepared ({type(error).__name__}: {error!s:.200})"
            refuse("#", problem, "constraint_not_compiled")
    if lowered is False:
        refuse("#", "accepts nothing: its conditions exclude one another", "constraint_accepts_nothing")
    return {} if lowered is True else lowered, notes
