"""The one seam between the control plane and the data plane. Torch-free, msgspec-encodable deltas.

Down: ``SchedulerOutput`` says what one step computes. Up: ``ModelRunnerOutput`` says what it sampled. The same bytes
serve broadcast to ranks, replay and the flight recorder.
"""

from __future__ import annotations

import msgspec

from headrace.core.timeline import Timeline
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import Constraint


class NewRequest(msgspec.Struct):
    """All that the data plane must know of a request it does not hold (new, or resumed after preemption).

    token_ids: every known token, prompt first.
    block_ids: per KV group, the blocks held, in token order (-1: released, never read).
    sample_seed: seed of its random stream; with (child_index, position) it gives each token's noise.
    prompt_logprobs_from: index of the first prompt token whose log-probability is still to be returned (0 when
        prompt log-probabilities are not wanted; the first token never has one). After a preemption it excludes those
        already delivered.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[list[int]]
    sampling_params: SamplingParams
    sample_seed: int
    child_index: int = 0
    eos_token_ids: list[int] = []
    prompt_logprobs_from: int = 0


class BlockCopy(msgspec.Struct, array_like=True, frozen=True):
    """Copy the first ``num_tokens`` tokens of block ``src`` to block ``dst``, over all layers of the group, before the
    step's forward, on the compute stream. The source stays owned until the step completes."""

    src: int
    dst: int
    num_tokens: int


class SharedPrefix(msgspec.Struct):
    """Requests of this step (by batch index) whose first ``num_blocks`` blocks are the same, in every full group.

    first_block: the span begins here; the blocks before it belong to spans of more requests (these among them).
    """

    batch_indices: list[int]
    num_blocks: int
    first_block: int = 0


class SchedulerOutput(msgspec.Struct):
    """One step, as a delta against what the data plane already holds.

    step_id: rises by one each step; the fence counts in it.
    request_ids, start_positions, num_tokens: the batch in order: request i computes tokens
        [start_positions[i], start_positions[i] + num_tokens[i]).
    sampled: batch indices of requests that sample after this step (those that reach their last token).
    new_requests: full state of requests unknown to the data plane; each is also in ``request_ids``.
    new_block_ids: {request id: per group, block ids appended since its last step}; only those that got some.
    appended_token_ids: {request id: tokens appended on the host (forced, drafted)}, after all tokens known before.
    kept_tokens: {request id: tokens that stay, where what was sampled after them does not count}, before the appended.
    removed_request_ids: finished or preempted since the last step; the data plane forgets them before all else.
    block_copies: done before the forward.
    shared_prefixes: for cascade attention; never needed for correctness. The spans of one request follow one another
        from its first block on.
    """

    step_id: int
    request_ids: list[str] = []
    start_positions: list[int] = []
    num_tokens: list[int] = []
    sampled: list[int] = []
    new_requests: list[NewRequest] = []
    new_block_ids: dict[str, list[list[int]]] = {}
    appended_token_ids: dict[str, list[int]] = {}
    kept_tokens: dict[str, int] = {}
    removed_request_ids: list[str] = []
    block_copies: list[BlockCopy] = []
    shared_prefixes: list[SharedPrefix] = []


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the token itself first, then the top ones in falling order.

    rank: rank of the token itself, 1 is the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class ErrorKind(msgspec.Struct, array_like=True, frozen=True):
    """Which typed error of ``headrace.errors`` a refusal is; the message stands beside it."""

    kind: str
    param: str | None = None
    code: str | None = None


NO_TOKEN_LEFT = (
    "no token may be sampled: bad_words, min_tokens, allowed_token_ids and the grammar forbid all of them"
)
NO_TOKEN_KIND = ErrorKind("RequestError", None, "no_token_allowed")


class ModelRunnerOutput(msgspec.Struct):
    """What one step produced.

    request_ids, sampled_token_ids: the requests that sampled, in batch order, and their tokens (one, or several when
        drafts were accepted).
    logprobs: {request id: one entry per sampled token}.
    prompt_logprobs: {request id: entries for prompt tokens whose logits this step computed, in order}.
    errors: {request id: message} of requests whose step failed (logits not finite, say); others are unharmed.
    refusals: {request id: kind} of those errors that are the request's own fault: it forbids every token.
    elapsed_ms: time of the step on the device, for the cost model; 0 when not measured.
    is_preparing: the step also prepared the next ones of its kind (a CUDA graph, say): its time says nothing of theirs.
    wait_ms: how long the host stood still for it, or computed in the device's place.
    """

    step_id: int
    request_ids: list[str] = []
    sampled_token_ids: list[list[int]] = []
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    errors: dict[str, str] = {}
    refusals: dict[str, ErrorKind] = {}
    elapsed_ms: float = 0.0
    wait_ms: float = 0.0
    is_preparing: bool = False


class EngineCoreRequest(msgspec.Struct):
    """A checked request on its way into the engine core (also over a socket).

    sample_seed: seed of its random stream, once the engine core has settled it.
    constraint: what the answer's text must be. It stands here and no more in ``sampling_params``, so that the data
        plane never carries a schema.
    is_read_whole: nobody wants a part of its answers before they end.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    eos_token_ids: list[int] = []
    arrival_time: float = 0.0
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    constraint: Constraint | None = None
    sample_seed: int | None = None
    is_read_whole: bool = False


class EngineCoreOutput(msgspec.Struct, omit_defaults=True):
    """News of one sequence. With n > 1 ``child_index`` tells the answers of one request apart.

    finish_reason: a ``FinishReason`` value, or None while it runs.
    refusal: with reason "error", when the request itself is wrong: a grammar that does not compile, or one that leaves
        no token beside those that the request forbids.
    timeline: given once, with the finish.
    """

    request_id: str
    child_index: int = 0
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: str | None = None
    refusal: ErrorKind | None = None
    num_cached_tokens: int = 0
    timeline: Timeline | None = None
