"""What the user gets back. Names and meanings follow vLLM's ``RequestOutput`` and ``CompletionOutput``."""

from __future__ import annotations

from dataclasses import dataclass, field


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
class RequestMetrics:
    """A finished request's times, in seconds of the monotonic clock: only differences mean anything, and None is what
    it never came to.

    arrival_time: the user's side took the request.
    first_scheduled_time: it left the queue.
    first_token_time, last_token_time: the first and the last token of all answers were committed.
    finished_time: the last answer ended.
    num_preemptions: how often answers had to give up their KV memory, and were computed again.
    token_times: for each answer, when each of its tokens was committed.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    token_times: list[list[float]] = field(default_factory=list)

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        start = self.first_scheduled_time
        return None if start is None else start - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """Everything known about one prompt and its answers so far.

    prompt_logprobs: one entry per prompt token; None for the first and for those before ``logprobs_from``.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    timeline: (name, monotonic seconds, cause) of every transition, once finished.
    metrics: its times, once finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    timeline: list[tuple[str, float, str]] = field(default_factory=list)
    metrics: RequestMetrics | None = None
