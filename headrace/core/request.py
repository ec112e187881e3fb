"""A request and its state machine.

QUEUED -> PREPARING (grammar compiling, KV loading, waiting for a sibling's prompt) -> QUEUED
QUEUED -> RUNNING <-> PREEMPTED
any    -> FINISHED(reason)
"""

from __future__ import annotations

import enum
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

    __slots__ = (
        "arrival_time",
        "block_table",
        "capacity_tokens",
        "child_index",
        "chooser",
        "eos_token_ids",
        "finish_reason",
        "group_id",
        "is_resident",
        "last_step_id",
        "lock",
        "max_tokens",
        "may_run_ahead",
        "max_total_tokens",
        "message",
        "namespace",
        "next_prompt_logprob",
        "num_cached_tokens",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_prompt_tokens",
        "num_steps_in_flight",
        "parent",
        "parent_id",
        "priority",
        "request_id",
        "resident_capacity",
        "runs_to_limit",
        "sample_seed",
        "sampling_params",
        "sequence",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tenant",
        "timeline",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival_time: float = 0.0,
        namespace: str = "",
        tenant: str = "",
        priority: int = 0,
        sample_seed: int = 0,
        parent: Request | None = None,
        parent_id: str | None = None,
        child_index: int = 0,
        group_id: str | None = None,
        may_run_ahead: bool = True,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.max_total_tokens = len(prompt_token_ids) + max_tokens
        self.eos_token_ids = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids or ()) | self.eos_token_ids
        self.runs_to_limit = not (
            self.stop_token_ids
            or sampling_params.stop
            or sampling_params.structured_outputs is not None
            or sampling_params.use_beam_search
        )
        self.arrival_time = arrival_time
        self.namespace = namespace
        self.tenant = tenant
        self.priority = priority
        self.sample_seed = sample_seed
        self.parent = parent
        self.parent_id = parent_id or request_id
        self.child_index = child_index
        self.group_id = group_id
        self.chooser: TokenChooser | None = None
        self.may_run_ahead = may_run_ahead
        self.status = RequestStatus.QUEUED
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.message: str | None = None
        self.timeline = Timeline()
        self.block_table: list[list[int]] = []
        self.capacity_tokens = 0
        self.lock: object | None = None
        self.num_cached_tokens = 0
        self.next_prompt_logprob = max(1, sampling_params.logprobs_from)
        self.sequence = 0
        self.num_committed_tokens = 0
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.num_steps_in_flight = 0
        self.last_step_id = 0
        self.is_resident = False
        self.resident_capacity = 0

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
