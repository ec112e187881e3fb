"""Where a tool's schema is at fault, said in the words of the request."""

from __future__ import annotations

import re

from headrace.errors import GrammarError
from headrace.serve.tools.tool_use import ToolUse

# The place of a schema in the structural tag that the tools became.
_PLACE = re.compile(r"(?:structural_tag: )?\$\.format\S*?\.?tags\[(\d+)\]\.content\.json_schema")


def tool_schema_error(error: GrammarError, use: ToolUse | None) -> GrammarError:
    """``error`` with the tool's own path in place of that in the structural tag."""
    if use is None or error.param != "structured_outputs.structural_tag":
        return error
    found = _PLACE.search(error.message)
    if found is None or int(found[1]) >= len(use.allowed):
        return error  # of the text beside the calls
    index = list(use.tools).index(use.allowed[int(found[1])])
    path = f"tools[{index}].function.parameters"
    return GrammarError(_PLACE.sub(path, error.message, count=1), param="tools", code=error.code)
