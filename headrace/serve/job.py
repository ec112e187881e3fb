"""Job: a checked request on its way to an answer, and what turns outputs into the answer's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engine.prompts import ParsedPrompt
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.serve.errors import ApiError
from headrace.serve.field_names import FieldNames


class AnswerFormat(Protocol):
    """The form of one answer in one API, whole or streamed. One object serves one request.

    Prompts are told apart by their index; outputs of a stream hold what is new.
    """

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer, of finished outputs in the prompts' order. Raises ApiError 500 if the engine failed."""

    def opening(self) -> bytes:
        """Events before the first token."""

    def events(self, index: int, output: RequestOutput) -> bytes:
        """Events for the new parts in ``output``, of prompt number ``index``; may be empty.

        Raises: ApiError 500 if the engine failed on it.
        """

    def closing(self) -> bytes:
        """Events after the last token."""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""


def end_of(answer: CompletionOutput) -> dict[str, Any]:
    """The fields that tell why an answer ended, or that it has not. Raises ApiError 500 if the engine failed on it."""
    if answer.finish_reason == "error":
        raise ApiError(500, answer.error or "the engine failed on this request", code="engine_error")
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


@dataclass(frozen=True)
class Job:
    """One request: all prompts share the parameters.

    clamp_max_tokens: the client set no limit, so a default beyond the context is cut to it, not refused.
    names: what the client calls the fields that errors speak of.
    """

    prompts: list[ParsedPrompt]
    params: SamplingParams
    format: AnswerFormat
    is_stream: bool
    clamp_max_tokens: bool
    priority: int
    names: FieldNames
