"""What the commands say of a server that refuses a request."""

from __future__ import annotations

import json
from http import HTTPStatus

BODY_BYTES = 65536
"""As much of an answer as is read for its reason."""
_SHOWN_CHARS = 500
_NO_ENTRY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def refusal(url: str, status: int, body: bytes) -> str:
    """One sentence: who refused, with which status and reason, and the fix where the key is what is wrong."""
    hint = "; give the server's key with --api-key" if status in _NO_ENTRY else ""
    return f"{url} answered {status}: {reason(body)}{hint}"


def reason(body: bytes) -> str:
    """The message of an error object, or the beginning of whatever else was answered."""
    text = body[:BODY_BYTES].decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:_SHOWN_CHARS]
