"""ChunkFormat: what answers of OpenAI's two older APIs have in common."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

from headrace import __version__
from headrace.engine.front_end import FrontEnd
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.serve.chunks import DONE, ChunkEnvelope, error_event, to_json
from headrace.serve.errors import ApiError
from headrace.serve.logprobs import TokenNames
from headrace.serve.protocol import GenerationRequest
from headrace.serve.usage import UsageCounter


class ChunkFormat(abc.ABC):
    """The form of one answer in OpenAI's completions and chat: choices, streamed in chunks.

    Choices are numbered prompt by prompt: choice ``index * n + answer.index``.
    """

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, request: GenerationRequest, model: str, front_end: FrontEnd) -> None:
        options = request.stream_options
        self.response_id = f"{self.id_prefix}-{request.request_id or uuid.uuid4().hex}"
        self.n = request.n or 1
        self.names = TokenNames(front_end.tokenizer, bool(request.return_tokens_as_token_ids))
        self.wants_token_ids = bool(request.return_token_ids)
        self._head: dict[str, Any] = {
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"headrace-{__version__}",
        }
        self._wants_usage = options is not None and bool(options.include_usage)
        self._wants_running_usage = options is not None and bool(options.continuous_usage_stats)
        self._is_text_only = not (
            self._wants_running_usage or self.wants_token_ids or self.has_logprobs(request)
        )
        self._text_parts: dict[int, tuple[bytes, bytes]] = {}
        self.usage = UsageCounter()
        self.envelope = ChunkEnvelope(self.head(self.chunk_name), self._wants_usage)

    def head(self, object_name: str) -> dict[str, Any]:
        """The fields that open each body and chunk."""
        return {"id": self.response_id, "object": object_name, **self._head}

    def add_notes(self, notes: list[str]) -> None:
        """Report what the request's constraint says and nobody enforces."""
        if notes:
            self._head["structured_outputs"] = {"notes": notes}
            self.envelope = ChunkEnvelope(self.head(self.chunk_name), self._wants_usage)

    @staticmethod
    def has_logprobs(request: GenerationRequest) -> bool:
        """Whether chunks hold log-probabilities."""
        wanted = getattr(request, "logprobs", None)
        return wanted is not None and wanted is not False  # 0 asks for those of the tokens themselves

    @abc.abstractmethod
    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer, of finished outputs in the prompts' order."""

    def opening(self) -> bytes:
        """Events before the first token."""
        return b""

    def events(self, index: int, output: RequestOutput) -> bytes:
        """Events for the new parts in ``output``, of prompt number ``index``; may be empty.

        Raises: ApiError 500 if the engine failed on it.
        """
        self.usage.add(index, output)
        data = b""
        for answer in output.outputs:
            number = index * self.n + answer.index
            parts = self._text_parts.get(number)
            if parts is None or answer.finish_reason is not None:
                data += self.detailed_events(number, output, answer)
                if self._is_text_only:
                    self._text_parts[number] = self.text_parts(number)
            elif answer.text:
                data += parts[0] + to_json(answer.text) + parts[1]
        return data

    @abc.abstractmethod
    def text_parts(self, number: int) -> tuple[bytes, bytes]:
        """What stands around the text in a chunk of choice ``number`` that holds nothing else."""

    @abc.abstractmethod
    def detailed_events(self, number: int, output: RequestOutput, answer: CompletionOutput) -> bytes:
        """Events for one answer's news, when they are its first or last or hold more than text."""

    def closing(self) -> bytes:
        """Events after the last token."""
        usage = self.envelope.usage_event(self.report_usage()) if self._wants_usage else b""
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        return error_event(error.body())

    def report_usage(self) -> dict[str, Any]:
        """Usage so far."""
        return self.usage.report()

    @property
    def running_usage(self) -> dict[str, Any] | None:
        """Usage so far if each chunk should tell it (``continuous_usage_stats``)."""
        return self.report_usage() if self._wants_running_usage else None
