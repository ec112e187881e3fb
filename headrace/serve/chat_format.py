"""ChatFormat: answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.front_end import FrontEnd
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.chunks import to_json
from headrace.serve.job import AnswerFormat, end_of
from headrace.serve.logprobs import chat_logprobs, prompt_logprobs
from headrace.serve.protocol import ChatRequest
from headrace.serve.usage import usage_of


class ChatFormat(AnswerFormat):
    """Chat completions: one prompt, n choices."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, model: str, front_end: FrontEnd) -> None:
        super().__init__(request, model, front_end)
        self._num_top = request.top_logprobs or 0
        self._wants_logprobs = bool(request.logprobs)
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._has_opened = False

    def _logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return chat_logprobs(self.names, answer.token_ids, answer.logprobs or [], self._num_top)

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer's object."""
        (output,) = outputs
        body = {
            **self.head(self.object_name),
            "choices": [self._choice(answer) for answer in output.outputs],
            "usage": usage_of(outputs),
        }
        if self._wants_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self.wants_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        choice = {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer),
            **end_of(answer),
        }
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
        """Content; the reason of an answer's end comes in a chunk of its own."""
        events = b""
        if self.wants_token_ids and not self._has_opened:
            self._has_opened = True
            events = self._event({"index": 0, "delta": {}, "prompt_token_ids": output.prompt_token_ids})
        if answer.text or (answer.token_ids and (self._wants_logprobs or self.wants_token_ids)):
            events += self._event(self._content(answer))
        if answer.finish_reason is not None:
            events += self._event({"index": number, "delta": {}, **end_of(answer)})
        return events

    def _content(self, answer: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": answer.index, "delta": {"content": answer.text}}
        if self._wants_logprobs:
            choice["logprobs"] = self._logprobs(answer)
        if self.wants_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _event(self, choice: dict[str, Any]) -> bytes:
        whole = {"logprobs": None, "finish_reason": None, **choice}
        return self.envelope.event(to_json(whole), self.running_usage)
