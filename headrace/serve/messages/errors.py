"""Anthropic's error objects."""

from __future__ import annotations

from typing import Any

from headrace.serve.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """The error object of a refusal."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.shown_message()}}
