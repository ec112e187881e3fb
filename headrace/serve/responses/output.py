"""OutputItems: the items of a response, built from events; each step of the building is an event of the stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from headrace.serve.tools.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

Item = dict[str, Any]


class OutputItems:
    """Takes in events in order. Messages and reasoning have one part of text each."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.reasoning = ""
        self._open: str | None = None

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Build on; what a stream tells of it, without sequence numbers."""
        match event:
            case Content(text):
                yield from self._text("message", text)
            case Reasoning(text):
                self.reasoning += text
                yield from self._text("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self.close("completed")
                item = {
                    "id": f"fc_{uuid.uuid4().hex}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call_id,
                    "name": name,
                    "arguments": "",
                }
                yield self._begin("function_call", item)
            case CallArguments(_, text):
                self.items[-1]["arguments"] += text
                yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}
            case CallEnd():
                yield from self.close("completed")

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self.close("completed")
            yield self._begin(kind, _new_item(kind))
            part = self._new_part(kind)
            self.items[-1]["content"].append(part)
            yield {
                "type": "response.content_part.added",
                **self._place(),
                "content_index": 0,
                "part": dict(part),
            }
        self.items[-1]["content"][0]["text"] += text
        yield {**self._text_event("delta"), "delta": text}

    def _new_part(self, kind: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def _begin(self, kind: str, item: Item) -> dict[str, Any]:
        self._open = kind
        self.items.append(item)
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": {**item, "content": []} if "content" in item else dict(item),
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _text_event(self, step: str) -> dict[str, Any]:
        is_message = self._open == "message"
        event = {
            "type": f"response.{'output_text' if is_message else 'reasoning_text'}.{step}",
            **self._place(),
            "content_index": 0,
        }
        return {**event, "logprobs": []} if is_message else event

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the open item, if there is one, as "completed" or "incomplete"."""
        if self._open is None:
            return
        item = self.items[-1]
        if self._open == "function_call":
            done = {"type": "response.function_call_arguments.done", **self._place()}
            yield {**done, "name": item["name"], "arguments": item["arguments"]}
        else:
            part = item["content"][0]
            yield {**self._text_event("done"), "text": part["text"]}
            place = {**self._place(), "content_index": 0}
            yield {"type": "response.content_part.done", **place, "part": part}
        item["status"] = status
        self._open = None
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}


def _new_item(kind: str) -> Item:
    if kind == "reasoning":
        return {
            "id": f"rs_{uuid.uuid4().hex}",
            "type": "reasoning",
            "summary": [],
            "status": "in_progress",
            "content": [],
        }
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
