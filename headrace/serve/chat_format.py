"""ChatFormat: answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.answer import best_answers
from headrace.engine.front_end import FrontEnd
from headrace.engine.prompts import ParsedPrompt
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.chat_plan import ChatPlan
from headrace.serve.chunk_format import ChunkFormat
from headrace.serve.chunks import to_json
from headrace.serve.failures import failure_object
from headrace.serve.job import end_of
from headrace.serve.logprobs import chat_logprobs, prompt_logprobs
from headrace.serve.parsed_stream import ParsedStream
from headrace.serve.protocol import ChatRequest
from headrace.serve.tools.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    ParsedAnswer,
    ParseFailure,
    Reasoning,
)
from headrace.serve.usage import usage_of


class ChatFormat(ChunkFormat):
    """Chat completions: one prompt, n choices, each read for reasoning and tool calls as the plan says."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, model: str, front_end: FrontEnd, plan: ChatPlan, prompt: ParsedPrompt
    ) -> None:
        super().__init__(request, model, front_end)
        self._num_top = request.top_logprobs or 0
        self._wants_logprobs = bool(request.logprobs)
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._has_opened = False
        self._streams: dict[int, ParsedStream] = {}
        self._new_stream = None if plan.is_plain else lambda: ParsedStream(plan.new_parser(prompt))
        if self._new_stream is not None:
            self._is_text_only = False

    def _stream(self, index: int) -> ParsedStream | None:
        """The reader of one answer; None where the whole text is content."""
        if self._new_stream is None:
            return None
        if index not in self._streams:
            self._streams[index] = self._new_stream()
        return self._streams[index]

    def _logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return chat_logprobs(self.names, answer.token_ids, answer.logprobs or [], self._num_top)

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer's object."""
        (output,) = outputs
        body = {
            **self.head(self.object_name),
            "choices": [self._choice(answer) for answer in best_answers(output.outputs, self.n)],
            "usage": usage_of(outputs),
        }
        if self._wants_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self.wants_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        end = end_of(answer)
        stream = self._stream(answer.index)
        if stream is None:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            whole = ParsedAnswer()
            whole.add(stream.read(answer))
            message = _message(whole)
            end["finish_reason"] = stream.finish_reason
        choice = {"index": answer.index, "message": message, "logprobs": self._logprobs(answer), **end}
        if self.wants_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def opening(self) -> bytes:
        """A chunk for each choice that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return b"".join([self._event({"index": i, "delta": delta}) for i in range(self.n)])

    def text_parts(self, number: int) -> tuple[bytes, bytes]:
        """What stands around the text of a chunk."""
        return self.envelope.text_event_parts(
            b'{"index":%d,"delta":{"content":' % number, b'},"logprobs":null,"finish_reason":null}'
        )

    def detailed_events(self, number: int, output: RequestOutput, answer: CompletionOutput) -> bytes:
        """Deltas; the reason of an answer's end comes in a chunk of its own."""
        events = b""
        if self.wants_token_ids and not self._has_opened:
            self._has_opened = True
            events = self._event({"index": 0, "delta": {}, "prompt_token_ids": output.prompt_token_ids})
        end = end_of(answer)
        deltas = [{"content": answer.text}] if answer.text else []
        stream = self._stream(number)
        if stream is not None:
            deltas = [delta for event in stream.read(answer) for delta in _deltas(event)]
            end["finish_reason"] = stream.finish_reason
        if not deltas and answer.token_ids and (self._wants_logprobs or self.wants_token_ids):
            deltas = [{}] if stream is not None else [{"content": ""}]
        for position, delta in enumerate(deltas):
            choice: dict[str, Any] = {"index": number, "delta": delta}
            events += self._event(choice if position else choice | self._token_details(answer))
        if answer.finish_reason is not None:
            events += self._event({"index": number, "delta": {}, **end})
        return events

    def _token_details(self, answer: CompletionOutput) -> dict[str, Any]:
        """What is told of the tokens in a chunk; it stands in the first chunk that they make."""
        details: dict[str, Any] = {}
        if self._wants_logprobs:
            details["logprobs"] = self._logprobs(answer)
        if self.wants_token_ids:
            details["token_ids"] = answer.token_ids
        return details

    def _event(self, choice: dict[str, Any]) -> bytes:
        whole = {"logprobs": None, "finish_reason": None, **choice}
        return self.envelope.event(to_json(whole), self.running_usage)


def _deltas(event: Event) -> list[dict[str, Any]]:
    match event:
        case Content(text):
            return [{"content": text}]
        case Reasoning(text):
            return [{"reasoning_content": text}]
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return [
                {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            ]
        case CallArguments(index, text):
            return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
        case CallEnd():
            return []
        case ParseFailure():
            return [{"tool_parse_errors": [failure_object(event)]}]


def _message(whole: ParsedAnswer) -> dict[str, Any]:
    has_content = bool(whole.content) or not whole.calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": whole.content if has_content else None,
        "refusal": None,
    }
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in whole.calls
        ]
    if whole.failures:
        message["tool_parse_errors"] = [failure_object(failure) for failure in whole.failures]
    return message
