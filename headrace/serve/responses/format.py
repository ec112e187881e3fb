"""ResponsesFormat: answers of /v1/responses: a list of items, whole or streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.outputs import RequestOutput
from headrace.serve.chat_plan import ChatPlan
from headrace.serve.chunks import to_json
from headrace.serve.context import tokenizer_of
from headrace.serve.errors import ApiError
from headrace.serve.failures import failure_object
from headrace.serve.job import end_of
from headrace.serve.parsed_stream import ParsedStream
from headrace.serve.responses.output import OutputItems
from headrace.serve.responses.protocol import FunctionTool, ResponsesRequest
from headrace.serve.tools.events import ParseFailure


class ResponsesFormat:
    """One response. It is built from events, whether these are sent or not."""

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        front_end: FrontEnd,
        plan: ChatPlan,
        prompt: ParsedPrompt,
    ) -> None:
        self._tokenizer = tokenizer_of(front_end)
        self._stream = ParsedStream(plan.new_parser(prompt))
        self._items = OutputItems()
        self._failures: list[ParseFailure] = []
        self._num_prompt_tokens = len(prompt.token_ids or [])
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._num_events = 0
        self._end: dict[str, Any] = {"status": "in_progress", "error": None, "incomplete_details": None}
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._settings = _settings(request)

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response. Raises ApiError 500 if the engine failed."""
        (output,) = outputs
        self._take(output)
        return self._response(self._items.items)

    def opening(self) -> bytes:
        """The response without output."""
        return self._sent(
            {"type": f"response.{step}", "response": self._response([])}
            for step in ("created", "in_progress")
        )

    def events(self, index: int, output: RequestOutput) -> bytes:
        """Events for the new parts of the answer. Raises ApiError 500 if the engine failed."""
        return self._sent(self._take(output))

    def closing(self) -> bytes:
        """The whole response."""
        event = {"type": f"response.{self._end['status']}", "response": self._response(self._items.items)}
        return self._sent([event])

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        self._end = {
            "status": "failed",
            "error": {"code": "server_error", "message": error.shown_message()},
            "incomplete_details": None,
        }
        return self.closing()

    def _take(self, output: RequestOutput) -> list[dict[str, Any]]:
        self._num_cached_tokens = output.num_cached_tokens
        news: list[dict[str, Any]] = []
        for answer in output.outputs:
            end_of(answer)
            self._num_output_tokens += len(answer.token_ids)
            for event in self._stream.read(answer):
                if isinstance(event, ParseFailure):
                    self._failures.append(event)
                    if event.index is not None:  # the open item is the call that stays cut off
                        news += self._items.close("incomplete")
                news += self._items.add(event)
            if answer.finish_reason is not None:
                news += self._finish()
        return news

    def _finish(self) -> list[dict[str, Any]]:
        is_cut = self._stream.finish_reason not in ("stop", "tool_calls")
        details = {"reason": "max_output_tokens"} if is_cut else None
        status = "incomplete" if is_cut else "completed"
        self._end = {"status": status, "error": None, "incomplete_details": details}
        return list(self._items.close(status))

    def _response(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        usage = None if self._end["status"] == "in_progress" else self._usage()
        response = {**self._head, **self._end, "output": items, "usage": usage, **self._settings}
        if self._failures:
            response["tool_parse_errors"] = [failure_object(failure) for failure in self._failures]
        return response

    def _usage(self) -> dict[str, Any]:
        thought = self._items.reasoning
        num_thought = len(self._tokenizer.encode(thought, add_special_tokens=False)) if thought else 0
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_thought, self._num_output_tokens)},
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
        }

    def _sent(self, events: Iterable[dict[str, Any]]) -> bytes:
        data = b""
        for event in events:
            kind: str = event["type"]
            body = to_json({**event, "sequence_number": self._num_events})
            self._num_events += 1
            data += b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
        return data


def _settings(request: ResponsesRequest) -> dict[str, Any]:
    """What the response repeats of its request. Nothing is stored, whatever was asked."""
    text = request.text
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": (text.format if text is not None else None) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool(tool) for tool in request.tools or []],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "background": False,
        "user": request.user,
    }


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
