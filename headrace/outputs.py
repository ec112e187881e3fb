"""What the user gets back. Names and meanings follow vLLM's ``RequestOutput`` and ``CompletionOutput``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log), its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    token_ids: generated ids, the stop token included, tokens past a stop string left out.
    logprobs: one dict {token id: Logprob} per generated token, or None.
    finish_reason: "stop", "length", "abort", "error" or None while running.
    stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
    error: the message of the typed error when finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """True once no more text will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """Everything known about one prompt and its answers so far.

    prompt_logprobs: one entry per prompt token; None for the first and for those before ``logprobs_from``.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    timeline: (name, monotonic seconds, cause) of every transition, once finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    timeline: list[tuple[str, float, str]] = field(default_factory=list)
    metrics: dict[str, Any] | None = None
