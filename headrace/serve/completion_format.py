"""CompletionFormat: answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.answer import best_answers
from headrace.engine.front_end import FrontEnd
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.chunk_format import ChunkFormat
from headrace.serve.chunks import to_json
from headrace.serve.echo import PromptEcho
from headrace.serve.job import end_of
from headrace.serve.logprobs import CompletionLogprobs, prompt_logprobs
from headrace.serve.protocol import CompletionRequest
from headrace.serve.usage import usage_of


class CompletionFormat(ChunkFormat):
    """Text completions, with echo, logprobs and the best of several.

    With ``max_tokens`` 0 the one token that was computed is left out everywhere.
    """

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, request: CompletionRequest, model: str, front_end: FrontEnd) -> None:
        super().__init__(request, model, front_end)
        self._num_top = request.logprobs
        self._has_answer = request.max_tokens != 0
        self._echo = PromptEcho(front_end.tokenizer, self.names) if request.echo else None
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._opened: set[int] = set()

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer's object."""
        choices = [
            self._choice(index * self.n + position, output, answer)
            for index, output in enumerate(outputs)
            for position, answer in enumerate(best_answers(output.outputs, self.n))
        ]
        return {
            **self.head(self.object_name),
            "choices": choices,
            "usage": usage_of(outputs, counts_answers=self._has_answer),
        }

    def _choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        text = answer.text if self._has_answer else ""
        logprobs = None
        if self._num_top is not None:
            lists = self._lists(number)
            if self._echo is not None:
                self._echo.add_logprobs(lists, output)
            if self._has_answer:
                lists.add(answer.token_ids, answer.logprobs or [])
            logprobs = lists.take()
        choice: dict[str, Any] = {
            "index": number,
            "text": self._echo.text(output) + text if self._echo is not None else text,
            "logprobs": logprobs,
            **self._end(answer),
        }
        if self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self.wants_token_ids:
            choice["token_ids"] = answer.token_ids if self._has_answer else []
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _end(self, answer: CompletionOutput) -> dict[str, Any]:
        end = end_of(answer)
        if not self._has_answer:
            return {"finish_reason": answer.finish_reason and "length", "stop_reason": None}
        return end

    def _lists(self, number: int) -> CompletionLogprobs:
        lists = self._logprobs.get(number)
        if lists is None:
            lists = self._logprobs[number] = CompletionLogprobs(self.names, self._num_top or 0)
        return lists

    def text_parts(self, number: int) -> tuple[bytes, bytes]:
        """What stands around the text of a chunk."""
        return self.envelope.text_event_parts(
            b'{"index":%d,"text":' % number, b',"logprobs":null,"finish_reason":null}'
        )

    def detailed_events(self, number: int, output: RequestOutput, answer: CompletionOutput) -> bytes:
        """The prompt first, if it is wanted; then the answer's chunk."""
        events = b""
        if number not in self._opened:
            self._opened.add(number)
            opening = self._opening_choice(number, output)
            if opening is not None:
                events = self.envelope.event(to_json(opening), self.running_usage)
        return events + self._event(number, answer)

    def _opening_choice(self, number: int, output: RequestOutput) -> dict[str, Any] | None:
        """The prompt, when it is wanted before the answer."""
        if self._echo is None and not self.wants_token_ids:
            return None
        choice: dict[str, Any] = {"index": number, "text": "", "logprobs": None, "finish_reason": None}
        if self._echo is not None:
            choice["text"] = self._echo.text(output)
            if self._num_top is not None:
                self._echo.add_logprobs(self._lists(number), output)
                choice["logprobs"] = self._lists(number).take()
        if self.wants_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = []
        return choice

    def _event(self, number: int, answer: CompletionOutput) -> bytes:
        if not self._has_answer:
            answer = CompletionOutput(answer.index, "", [], **self._end(answer))
        is_empty = not answer.text and answer.finish_reason is None
        if is_empty and self._num_top is None and not self.wants_token_ids:
            return b""
        choice = {"index": number, "text": answer.text, "logprobs": None, **self._end(answer)}
        if self._num_top is not None and self._has_answer:
            lists = self._lists(number)
            lists.add(answer.token_ids, answer.logprobs or [])
            choice["logprobs"] = lists.take()
        if self.wants_token_ids:
            choice["token_ids"] = answer.token_ids
        return self.envelope.event(to_json(choice), self.running_usage)

    def report_usage(self) -> dict[str, Any]:
        """Usage so far."""
        return self.usage.report(counts_answers=self._has_answer)
