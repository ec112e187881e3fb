"""How a text that is no tool call is told to clients."""

from __future__ import annotations

from typing import Any

from headrace.serve.tools.events import ParseFailure


def failure_object(failure: ParseFailure) -> dict[str, Any]:
    """An entry of ``tool_parse_errors``, the same in every API."""
    return {"code": failure.code, "message": failure.message, "tool_call_index": failure.index}
