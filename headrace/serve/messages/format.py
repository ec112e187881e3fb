"""MessagesFormat: answers of /v1/messages: a list of content blocks, whole or streamed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from headrace.engine.prompts import ParsedPrompt
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.chat_plan import ChatPlan
from headrace.serve.chunks import to_json
from headrace.serve.errors import ApiError
from headrace.serve.failures import failure_object
from headrace.serve.job import end_of
from headrace.serve.messages.errors import error_body
from headrace.serve.messages.partial_json import partial_object
from headrace.serve.parsed_stream import ParsedStream
from headrace.serve.tools.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    ParseFailure,
    Reasoning,
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """One message. Text, thinking and calls are blocks in the order in which the model wrote them."""

    def __init__(self, model: str, plan: ChatPlan, prompt: ParsedPrompt) -> None:
        self._model = model
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._stream = ParsedStream(plan.new_parser(prompt))
        self._failures: list[ParseFailure] = []
        self._num_prompt_tokens = len(prompt.token_ids or [])
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._num_blocks = 0
        self._open_kind: str | None = None

    # ---- whole

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The message. Raises ApiError 500 if the engine failed."""
        (output,) = outputs
        (answer,) = output.outputs
        self._count(output)
        blocks: list[dict[str, Any]] = []
        for event in self._read(answer):
            _add_to_blocks(blocks, event)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = partial_object(block["input"])
        return self._message(blocks) | self._end(answer) | {"usage": self._usage()}

    def _read(self, answer: CompletionOutput) -> list[Event]:
        end_of(answer)
        events = self._stream.read(answer)
        self._failures += [event for event in events if isinstance(event, ParseFailure)]
        return events

    def _count(self, output: RequestOutput) -> None:
        self._num_cached_tokens = output.num_cached_tokens
        self._num_output_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self, answer: CompletionOutput) -> dict[str, Any]:
        reason: str | None = _STOP_REASONS.get(self._stream.finish_reason or "")
        text = answer.stop_reason if isinstance(answer.stop_reason, str) and reason == "end_turn" else None
        end = {"stop_reason": "stop_sequence" if text is not None else reason, "stop_sequence": text}
        if self._failures:
            end["tool_parse_errors"] = [failure_object(failure) for failure in self._failures]  # type: ignore[assignment]
        return end

    def _usage(self) -> dict[str, Any]:
        """Cached tokens are counted apart, as Anthropic does."""
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached_tokens,
            "output_tokens": self._num_output_tokens,
        }

    # ---- streamed

    def opening(self) -> bytes:
        """The message without content."""
        return _event({"type": "message_start", "message": self._message([])}) + _event({"type": "ping"})

    def events(self, index: int, output: RequestOutput) -> bytes:
        """Events for the new parts of the answer. Raises ApiError 500 if the engine failed."""
        self._count(output)
        data = b""
        for answer in output.outputs:
            for event in self._read(answer):
                data += self._block_events(event)
            if answer.finish_reason is not None:
                data += self._close_block()
                delta = {"type": "message_delta", "delta": self._end(answer), "usage": self._usage()}
                data += _event(delta)
        return data

    def _block_events(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._part("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": text})
            case Reasoning(text):
                start = {"type": "thinking", "thinking": "", "signature": ""}
                return self._part("thinking", start, {"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                return self._open("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                return self._close_block()
            case ParseFailure():
                return b""

    def _part(self, kind: str, start: dict[str, Any], delta: dict[str, Any]) -> bytes:
        """A piece of a block of text, which is opened if another kind is open."""
        opening = b"" if self._open_kind == kind else self._open(kind, start)
        return opening + self._delta(delta)

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closing = self._close_block()
        self._open_kind = kind
        return closing + _event(
            {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _close_block(self) -> bytes:
        if self._open_kind is None:
            return b""
        self._open_kind = None
        self._num_blocks += 1
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def closing(self) -> bytes:
        """The end of the message."""
        return _event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        return _event(error_body(error))


def _add_to_blocks(blocks: list[dict[str, Any]], event: Event) -> None:
    """Add an event to the blocks; a call's ``input`` is text at first."""
    last: dict[str, Any] = blocks[-1] if blocks else {"type": ""}
    match event:
        case Content(text) if last["type"] == "text":
            last["text"] += text
        case Content(text):
            blocks.append({"type": "text", "text": text})
        case Reasoning(text) if last["type"] == "thinking":
            last["thinking"] += text
        case Reasoning(text):
            blocks.append({"type": "thinking", "thinking": text, "signature": ""})
        case CallStart(_, call_id, name):
            blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": ""})
        case CallArguments(_, text):
            last["input"] += text


def _event(body: dict[str, Any]) -> bytes:
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\ndata: " + to_json(body) + b"\n\n"
