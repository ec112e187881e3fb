"""Where every request is, and each way from one state to the next. One machine, in one file.

A request is in exactly one place: ``waiting`` (QUEUED, PREEMPTED), ``preparation`` (PREPARING) or ``running``
(RUNNING); finished ones are in none. Leaving ``running`` frees its blocks behind the fence and makes the data plane
forget it with the next step.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core import fork
from headrace.core.interfaces import Clock
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.policy import Policy, WaitingQueue
from headrace.core.prefix_order import PrefixFirstQueue
from headrace.core.preparation import Preparation
from headrace.core.request import FinishReason, Request, RequestStatus

RUNNING = RequestStatus.RUNNING


class Lifecycle:
    """The requests of one engine and their transitions.

    removed_ids, appended_ids, kept_tokens: what the next step's delta must say of requests the data plane holds.
    num_recomputed_tokens: tokens computed again because a preemption lost their KV.
    """

    def __init__(self, kv: KVCacheManager, policy: Policy, clock: Clock) -> None:
        self.kv = kv
        self.policy = policy
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = (
            PrefixFirstQueue(policy, kv.cached_tokens) if policy.is_prefix_first else WaitingQueue(policy)
        )
        self.preparation = Preparation()
        self.removed_ids: list[str] = []
        self.appended_ids: dict[str, list[int]] = {}
        self.kept_tokens: dict[str, int] = {}
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        """Requests that are not running yet, or not any more."""
        return len(self.waiting) + len(self.preparation)

    def add(self, request: Request, is_ready: Callable[[Request], bool] | None = None) -> None:
        """Queue a new request, or hold it while its leader computes their prompt.

        Args:
            is_ready: if given, it is held until this says that it may go on: its grammar is compiled.
        """
        request.sequence = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        now = self.clock()
        request.timeline.stamp(RequestStatus.QUEUED.name, now)
        if is_ready is not None and not is_ready(request):
            self.preparation.hold(request, _both(is_ready, fork.is_ready), now, "waits for its grammar")
        elif fork.is_ready(request):
            self.waiting.push(request)
        else:
            self.preparation.hold(request, fork.is_ready, now, "waits for its sibling's prompt")

    def prepare(self, request: Request, is_ready: Callable[[Request], bool], cause: str) -> None:
        """Take a waiting request aside until ``is_ready`` says that it may go on; asked once a step."""
        self.waiting.remove(request)
        self.preparation.hold(request, is_ready, self.clock(), cause)

    def collect_prepared(self) -> None:
        """Requests whose wait is over go on: those that hold blocks run, the others queue."""
        for request in self.preparation.take_ready():
            if request.block_table:
                self.kv.commit(request)
                self.start(request, "loaded")
            else:
                request.move_to(RequestStatus.QUEUED, self.clock(), "prepared")
                self.waiting.push(request)

    def start(self, request: Request, cause: str) -> None:
        """Run a request that holds its first blocks."""
        self.waiting.remove(request)
        if request.timeline.num_preemptions:
            self.num_recomputed_tokens -= request.num_computed_tokens
        request.move_to(RUNNING, self.clock(), cause)
        self.running.append(request)
        if self.policy.is_priority:
            self.running.sort(key=self.policy.key)

    def append_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Add tokens known on the host (forced by a grammar, chosen by a beam) after all tokens known so far.

        The request must have no step in flight (``may_run_ahead`` False); they are computed as one chunk.
        """
        assert request.num_steps_in_flight == 0 and not request.is_finished
        request.token_ids += token_ids
        if request.is_resident:
            self.appended_ids.setdefault(request.request_id, []).extend(token_ids)

    def choose_token(self, request: Request, token: int) -> None:
        """Add the token that a ``TokenChooser`` took; what the device sampled in its place does not count."""
        if request.is_resident:
            self.kept_tokens[request.request_id] = request.num_tokens
        self.append_tokens(request, [token])

    def adopt(self, child: Request, parent: Request) -> None:
        """Take in a request forked from another, at the other's place in the order. It runs if it holds blocks."""
        child.sequence = parent.sequence
        self.requests[child.request_id] = child
        child.timeline.stamp(RequestStatus.QUEUED.name, self.clock(), "forked")
        if child.block_table:
            self.start(child, "forked")
        else:
            self.waiting.push(child)

    def preempt(self, request: Request, cause: str) -> None:
        """Free the blocks of a running request (and of its group) and queue it again at its old place. It computes
        again what the cache loses; samples of its steps in flight still count."""
        group = request.group_id
        members = [request] if group is None else [r for r in self.running if r.group_id == group]
        for member in members:
            self.num_preemptions += 1
            self.num_recomputed_tokens += member.num_computed_tokens
            self.kv.free(member)
            member.num_computed_tokens = member.num_committed_tokens = 0
            member.timeline.num_preemptions += 1
            member.move_to(RequestStatus.PREEMPTED, self.clock(), cause)
            self._forget(member)
            self.waiting.push(member)
        self.drop_stopped()

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        message: str | None = None,
    ) -> None:
        """End a request in any state. It stays listed in ``running`` until ``drop_stopped``, which callers run once
        for many. Samples of its steps in flight are discarded."""
        self._forget(request)
        self.waiting.remove(request)
        self.preparation.remove(request)
        if request.block_table:
            self.kv.free(request)
        request.finish_reason, request.stop_reason, request.message = reason, stop_reason, message
        request.move_to(RequestStatus.FINISHED, self.clock(), reason.value)
        del self.requests[request.request_id]

    def drop_stopped(self) -> None:
        """Take requests that run no more out of ``running``."""
        self.running = [request for request in self.running if request.status is RUNNING]

    def _forget(self, request: Request) -> None:
        """The data plane drops what it holds of a request, with the next step."""
        if request.is_resident:
            request.is_resident = False
            self.removed_ids.append(request.request_id)
        self.appended_ids.pop(request.request_id, None)
        self.kept_tokens.pop(request.request_id, None)

    def check_integrity(self) -> None:
        """Prove that every request is in exactly one place. For tests."""
        places = [*self.running, *self.waiting, *self.preparation]
        assert len(places) == len(set(places)) == len(self.requests), "a request is in no place or in two"
        for request in places:
            assert self.requests[request.request_id] is request, f"{request.request_id} is not registered"
            assert (request.status is RUNNING) == (request in self.running), (
                f"{request.request_id}: wrong place"
            )
            known = request.num_tokens + request.num_placeholders
            assert request.num_committed_tokens <= request.num_computed_tokens <= known
            assert request.num_computed_tokens <= request.capacity_tokens
            assert request.num_committed_tokens <= request.num_tokens
        self.kv.check_integrity(places)


def _both(first: Callable[[Request], bool], second: Callable[[Request], bool]) -> Callable[[Request], bool]:
    return lambda request: first(request) and second(request)
