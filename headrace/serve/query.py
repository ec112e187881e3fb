"""Query parameters: what one of the server's own routes does not know is refused, as unknown fields of bodies are."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from starlette.requests import Request

from headrace.serve.errors import bad_request


def check_query(request: Request, known: Sequence[str]) -> None:
    """Raises ApiError 400 for a parameter that is not among ``known``, and for one that is given twice."""
    place = f"{request.method} {request.url.path[:200]}"
    seen: set[str] = set()
    for full_name, _ in request.query_params.multi_items():
        name = full_name[:100]
        if full_name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            takes = f"it takes {', '.join(map(repr, known))}" if known else "it takes none"
            hint = f"; did you mean {near[0]!r}?" if near else "; leave it out"
            raise bad_request(
                f"{place} has no query parameter {name!r}: {takes}{hint}", name, code="unknown_parameter"
            )
        if name in seen:
            raise bad_request(
                f"{place} was given the query parameter {name!r} twice: give it once",
                name,
                code="repeated_parameter",
            )
        seen.add(name)
