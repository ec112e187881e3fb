"""A request and its state machine.

QUEUED -> PREPARING (grammar compiling, KV loading, waiting for a sibling's prompt) -> QUEUED
QUEUED -> RUNNING <-> PREEMPTED
any    -> FINISHED(reason)
"""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING

from headrace.core.timeline import Timeline
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.core.interfaces import TokenChooser


class RequestStatus(enum.IntEnum):
    """Where a request stands; ``Request.move_to`` stamps each change."""

    QUEUED = 0
    PREPARING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, repr=False, slots=True)
class Request:
    """One sequence to compute: a prompt, what was generated, and how far its KV has got.

    Token counts, all for one sequence::

        |---- num_committed_tokens ----|                      KV known to be in place (its step completed)
        |------------- num_computed_tokens ----------|        KV in place once the steps in flight complete
        |------------- num_tokens --------------|.............| + num_placeholders
          prompt and committed output tokens      tokens that steps in flight will sample

    A step gives it up to ``num_tokens + num_placeholders - num_computed_tokens`` tokens. ``num_computed_tokens`` may
    be rolled back (preemption, rejected drafts).

    block_table: per KV group, block ids in token order (block i holds tokens i*block_size ...); -1 where a sliding
        group's block was released. Owned by the KV cache manager.
    capacity_tokens: tokens that fit into the blocks held.
    may_run_ahead: False makes it wait for its last result before it is scheduled again.
    group_id: requests of one co-schedule group are scheduled, preempted and freed together.
    chooser: decides its next token from log-probabilities, together with those of its group (a beam search); None
        when what the device samples is its next token.
    namespace: radix namespace (model, adapter, KV dtype, tenant salt).
    last_step_id: the last step that reads or writes its blocks; the fence of its memory.
    is_resident: the data plane holds its state.  resident_capacity: the capacity of the blocks it was told of.
    parent: the sibling whose prompt blocks it forks (children of n > 1), or None.
    parent_id: the user's request id, shared by the children of n > 1.
    next_prompt_logprob: index of the first prompt token whose log-probability is not delivered yet.
    sequence: order of arrival, the tie breaker of every queue.
    runs_to_limit: nothing ends its answer before the limit, neither a token, nor a text, a grammar or a search.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling_params: SamplingParams
    _: KW_ONLY
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    sample_seed: int = 0
    parent: Request | None = None
    parent_id: str = ""
    child_index: int = 0
    group_id: str | None = None
    may_run_ahead: bool = True

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    runs_to_limit: bool = field(init=False)
    next_prompt_logprob: int = field(init=False)
    chooser: TokenChooser | None = field(default=None, init=False)
    status: RequestStatus = field(default=RequestStatus.QUEUED, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    message: str | None = field(default=None, init=False)
    timeline: Timeline = field(default_factory=Timeline, init=False)
    block_table: list[list[int]] = field(default_factory=list, init=False)
    capacity_tokens: int = field(default=0, init=False)
    lock: object | None = field(default=None, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    sequence: int = field(default=0, init=False)
    num_committed_tokens: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_placeholders: int = field(default=0, init=False)
    num_steps_in_flight: int = field(default=0, init=False)
    last_step_id: int = field(default=0, init=False)
    is_resident: bool = field(default=False, init=False)
    resident_capacity: int = field(default=0, init=False)

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        params = self.sampling_params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        if params.ignore_eos:
            self.eos_token_ids = frozenset()
        self.stop_token_ids = frozenset(params.stop_token_ids or ()) | self.eos_token_ids
        self.runs_to_limit = not (
            self.stop_token_ids
            or params.stop
            or params.structured_outputs is not None
            or params.use_beam_search
        )
        self.parent_id = self.parent_id or self.request_id
        self.next_prompt_logprob = max(1, params.logprobs_from)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and committed output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that came from a cache. Tokens that a grammar forced before its first step may have, too."""
        return min(self.num_cached_tokens, self.num_prompt_tokens)

    @property
    def must_wait(self) -> bool:
        """Whether results of its steps in flight must come in before it is scheduled again."""
        return not self.may_run_ahead and self.num_steps_in_flight > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log-probabilities of prompt tokens are still to be computed."""
        wanted = self.sampling_params.prompt_logprobs is not None
        return wanted and self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """How much of it may come from a cache: one token is always computed, and those whose logits are wanted."""
        limit = len(self.token_ids) - 1
        return min(limit, self.next_prompt_logprob - 1) if self.wants_prompt_logprobs else limit

    @property
    def is_finished(self) -> bool:
        """True once nothing more will be computed for it."""
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus, now: float, cause: str = "") -> None:
        """Change state and stamp it."""
        self.status = status
        self.timeline.stamp(status.name, now, cause)
