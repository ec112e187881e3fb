"""Server-sent events of a stream, put together from bytes: most of an event is the same from token to token."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"

to_json = msgspec.json.encode


def error_event(body: dict[str, Any]) -> bytes:
    """An event that tells of a failure in the middle of a stream."""
    return b"data: " + to_json(body) + b"\n\n"


class ChunkEnvelope:
    """What stands around the choices in each chunk of one stream.

    Args:
        head: the chunk's fields before ``choices``.
        has_usage: the client asked for usage; chunks without it say null, as OpenAI's do.
    """

    def __init__(self, head: dict[str, Any], has_usage: bool) -> None:
        self._start = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._plain_end = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    def text_event_parts(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands before and after a text in chunks that differ in their text alone.

        Args:
            before, after: the rest of the choice, around the text.
        """
        return self._start + before, after + self._plain_end

    def event(self, choice: bytes, usage: dict[str, Any] | None = None) -> bytes:
        """One chunk with one choice, given as JSON."""
        if usage is None:
            return self._start + choice + self._plain_end
        return self._start + choice + b'],"usage":' + to_json(usage) + b"}\n\n"

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, which has no choice."""
        return self._start + b'],"usage":' + to_json(usage) + b"}\n\n"
