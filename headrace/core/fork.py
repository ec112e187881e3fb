"""Child requests: the answers of n > 1 are siblings that share their prompt's blocks.

Child 0 leads: it computes the prompt. The others wait (PREPARING) until the step that computes the last prompt token
is scheduled, then fork from it all but the last prompt token: full blocks are shared, the partial one is copied, and
each child computes the last prompt token itself, so that it samples its first token from its own logits. If the
leader is gone by then, a child starts as any other request does. The scheduler only sees requests.
"""

from __future__ import annotations

from headrace.core.output import EngineCoreRequest
from headrace.core.request import Request
from headrace.core.step import Step


def make_requests(core_request: EngineCoreRequest, sample_seed: int) -> list[Request]:
    """The requests that compute one user's request, the leader first.

    Args:
        sample_seed: seed of the random stream; children differ by their index.
    """
    leader: Request | None = None
    requests: list[Request] = []
    params = core_request.sampling_params
    for index in range(1 if params.use_beam_search else params.num_sequences):
        child = Request(
            core_request.request_id if index == 0 else f"{core_request.request_id}#{index}",
            core_request.prompt_token_ids,
            core_request.sampling_params,
            max_tokens=core_request.max_tokens,
            eos_token_ids=frozenset(core_request.eos_token_ids),
            arrival_time=core_request.arrival_time,
            namespace=core_request.namespace,
            tenant=core_request.tenant,
            priority=core_request.priority,
            sample_seed=sample_seed,
            parent=leader,
            parent_id=core_request.request_id,
            child_index=index,
            may_run_ahead=not _depends_on_text(core_request),
        )
        if leader is None:
            leader = child
        else:
            child.next_prompt_logprob = child.num_prompt_tokens  # the leader delivers the prompt's
        requests.append(child)
    return requests


def branch(parent: Request, request_id: str, token: int) -> Request:
    """A beam that continues ``parent``'s tokens with one of its own. It holds no blocks yet."""
    child = Request(
        request_id,
        parent.token_ids,
        parent.sampling_params,
        max_tokens=parent.max_tokens,
        arrival_time=parent.arrival_time,
        namespace=parent.namespace,
        tenant=parent.tenant,
        priority=parent.priority,
        sample_seed=parent.sample_seed,
        parent_id=parent.parent_id,
        child_index=parent.child_index,
        group_id=parent.group_id,
        may_run_ahead=False,
    )
    child.token_ids.append(token)
    child.num_prompt_tokens = child.next_prompt_logprob = parent.num_prompt_tokens
    child.max_total_tokens = parent.max_total_tokens
    child.eos_token_ids, child.stop_token_ids = parent.eos_token_ids, parent.stop_token_ids
    child.chooser = parent.chooser
    return child


def is_ready(child: Request) -> bool:
    """True once a waiting child can start: its leader's prompt is scheduled, or its leader is gone."""
    leader = child.parent
    return leader is None or leader.is_finished or leader.num_computed_tokens >= leader.num_prompt_tokens


def fork_length(child: Request, step: Step) -> int | None:
    """Tokens to fork from the leader in ``step``, or None when the child has to start by itself.

    Only what earlier steps compute can be forked, since block copies come before a step's forward.
    """
    leader = child.parent
    if leader is None or child.num_output_tokens or not leader.block_table:
        return None
    shared = child.num_prompt_tokens - 1
    return shared if 0 < shared <= step.start_of(leader) else None


def _depends_on_text(core_request: EngineCoreRequest) -> bool:
    """True when the next step's masks depend on sampled tokens in a way only the host resolves (multi-token words)."""
    return any(len(word) > 1 for word in core_request.sampling_params.bad_word_ids or ())
