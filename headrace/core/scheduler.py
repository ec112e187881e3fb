"""Decides what each step computes. An outline of named steps; features live behind the interfaces it calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.config import SchedulerConfig
from headrace.core import fork
from headrace.core.admission import Admission
from headrace.core.batching import Stage, make_batching
from headrace.core.completion import complete_step
from headrace.core.cost_model import CostModel
from headrace.core.interfaces import Clock
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from headrace.core.policy import Policy, WaitingQueue
from headrace.core.preparation import Preparation, TierLoads
from headrace.core.request import FinishReason, Request, RequestStatus
from headrace.core.step import Step
from headrace.errors import CapacityError


RUNNING = RequestStatus.RUNNING


class Scheduler:
    """Gives every request tokens until ``num_computed_tokens`` reaches what it knows, within one budget a step.

    ``schedule`` may be called again before the results of earlier steps are in; ``update_from_output`` takes results
    in step order. A request is in exactly one place: ``waiting`` (QUEUED, PREEMPTED), ``preparation`` (PREPARING) or
    ``running`` (RUNNING).
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, clock: Clock = time.monotonic) -> None:
        self.config = config
        self.kv = kv
        self.clock = clock
        self.cost_model = CostModel()
        self.policy = Policy(config.policy)
        self.batching = make_batching(config.batching, self.cost_model, config.max_stall_ms)
        self.admission = Admission(self.policy, kv.blocks_per_token, kv.num_blocks)
        self.tier_loads = TierLoads(kv.tier) if kv.tier is not None else None
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = WaitingQueue(self.policy)
        self.preparation = Preparation()
        self.last_step_id = 0
        self.completed_step_id = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_computed_tokens = 0
        self.in_flight: deque[Step] = deque()
        self._removed_ids: list[str] = []
        self._appended_ids: dict[str, list[int]] = {}
        self._num_arrived = 0

    # ---- requests come and go -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request, or hold it while its leader computes the prompt.

        Raises: CapacityError when the queue is full or the request can never fit into the KV cache.
        """
        self._check_capacity(request)
        request.sequence = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        now = self.clock()
        request.timeline.stamp("QUEUED", now)
        if fork.is_ready(request):
            self.waiting.push(request)
        else:
            self.preparation.hold(request, fork.is_ready, now, "waits for its sibling's prompt")

    def hold(self, request: Request, is_ready: Callable[[Request], bool], cause: str) -> None:
        """Keep a queued request PREPARING until ``is_ready`` says so (a grammar that compiles, say)."""
        self.waiting.remove(request)
        self.preparation.hold(request, is_ready, self.clock(), cause)

    def _check_capacity(self, request: Request) -> None:
        limit = self.config.max_waiting_requests
        if len(self.waiting) + len(self.preparation) >= limit:
            raise CapacityError(
                f"{limit} requests are waiting already, the limit max_waiting_requests; try again later",
                code="queue_full",
            )
        most = self.kv.max_tokens_of_one_request()
        if request.num_prompt_tokens + 1 > most:
            raise CapacityError(
                f"a prompt of {request.num_prompt_tokens} tokens can never fit: the KV cache holds {most} tokens of one "
                f"request; raise kv_cache_bytes or shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        request.max_total_tokens = min(request.max_total_tokens, most)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        message: str | None = None,
    ) -> None:
        """End a request in any state; its blocks wait for the fence, the samples of steps in flight are discarded."""
        if request.is_finished:
            return
        self._forget(request)
        self.waiting.remove(request)
        self.preparation.remove(request)
        if request.block_table:
            self.kv.free(request)
        request.finish_reason, request.stop_reason, request.message = reason, stop_reason, message
        request.move_to(RequestStatus.FINISHED, self.clock(), reason.value)
        del self.requests[request.request_id]
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self.admission.estimator.observe(request)

    def _forget(self, request: Request) -> None:
        """Tell the data plane, with the next step, to drop what it holds of a request."""
        if request.is_resident:
            request.is_resident = False
            self._removed_ids.append(request.request_id)
        self._appended_ids.pop(request.request_id, None)

    def drop_finished(self) -> None:
        """Take finished requests out of ``running``; once after a batch of ``finish`` calls."""
        self.running = [request for request in self.running if request.status is RUNNING]

    def append_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Add tokens known on the host (forced by a grammar, chosen by a beam) after all tokens known so far.

        The request must have no step in flight (``may_run_ahead`` False); they are computed as one chunk.
        """
        assert request.num_steps_in_flight == 0 and not request.is_finished
        request.token_ids += token_ids
        if request.status is RUNNING:
            self._appended_ids.setdefault(request.request_id, []).extend(token_ids)

    # ---- one step -------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Compose the next step; None when nothing can run before results of earlier steps come in."""
        step = Step(self.last_step_id + 1)
        self._collect_prepared()
        for stages in self.batching.stages(len(self.running)):
            for stage in stages:
                self._run_stage(stage, step)
            if step.requests:
                break
        if not step.requests:
            self._break_deadlock()
            return None
        return self._launch(step)

    def _run_stage(self, stage: Stage, step: Step) -> None:
        if stage is Stage.DECODE:
            self._schedule_decodes(step)
        elif stage is Stage.CHUNK:
            self._schedule_chunks(step)
        else:
            self._admit_waiting(step)

    def _collect_prepared(self) -> None:
        """Requests whose wait is over go on: those that hold blocks run, the others queue."""
        for request in self.preparation.take_ready():
            if request.block_table:
                self._start(request, "cache tier loaded")
            else:
                request.move_to(RequestStatus.QUEUED, self.clock(), "prepared")
                self.waiting.push(request)

    def _schedule_decodes(self, step: Step) -> None:
        """Running streams: one token each, memory permitting."""
        for request in self.running:
            known = len(request.token_ids) + request.num_placeholders
            start = request.num_computed_tokens
            if known - start != 1 or known >= request.max_total_tokens or request.status is not RUNNING:
                continue
            if request.num_steps_in_flight and not request.may_run_ahead:
                continue
            if request.group_id is not None:
                self._schedule_group(step, request.group_id)
                continue
            if start < request.capacity_tokens or self._make_room(request, known, step):
                step.add(request, 1)
        step.num_decodes = len(step.requests)

    def _schedule_group(self, step: Step, group_id: str) -> None:
        """A co-schedule group decodes together or not at all."""
        members = [request for request in self.running if request.group_id == group_id]
        if any(not self._can_decode(request) or request.last_step_id == step.step_id for request in members):
            return
        for request in members:
            if not self._make_room(request, request.num_computed_tokens + 1, step):
                return
        for request in members:
            step.add(request, 1)

    def _can_decode(self, request: Request) -> bool:
        known = len(request.token_ids) + request.num_placeholders
        waits = bool(request.num_steps_in_flight) and not request.may_run_ahead
        return (
            request.status is RUNNING
            and known - request.num_computed_tokens == 1
            and known < request.max_total_tokens
            and not waits
        )

    def _schedule_chunks(self, step: Step) -> None:
        """Running requests with several tokens to compute, in order, as far as the budget goes."""
        for request in list(self.running):
            if request.status is not RUNNING or request.last_step_id == step.step_id:
                continue
            start = request.num_computed_tokens
            wanted = len(request.token_ids) + request.num_placeholders - start
            if wanted < 2 or (request.num_steps_in_flight and not request.may_run_ahead):
                continue
            num_tokens = self._chunk(step, start, wanted)
            if num_tokens <= 0:
                break
            if self._make_room(request, start + num_tokens, step):
                step.add(request, num_tokens)

    def _chunk(self, step: Step, start: int, wanted: int) -> int:
        """How many of a request's next ``wanted`` tokens may join the step."""
        wanted = min(wanted, self.config.max_num_batched_tokens - step.num_tokens)
        if self.config.max_prefill_chunk is not None:
            wanted = min(wanted, self.config.max_prefill_chunk)
        if wanted <= 0:
            return 0
        step.count_features()
        return self.batching.chunk_tokens(step.num_decodes, step.features, start, wanted)

    # ---- admission and preemption ---------------------------------------------------------------------------

    def _admit_waiting(self, step: Step) -> None:
        """Waiting requests in policy order, until one does not fit; nobody overtakes it."""
        while step.num_tokens < self.config.max_num_batched_tokens:
            request = self.waiting.peek()
            if request is None or request.num_steps_in_flight:
                return
            has_seat = len(self.running) < self.config.max_num_seqs
            if not (has_seat and self._admit(request, step)) and not self._preempt_for(request, step):
                return

    def _admit(self, request: Request, step: Step) -> bool:
        """Start a waiting request in this step; False if budget or memory do not allow it."""
        shared = fork.fork_length(request)
        if shared is not None:
            return self._admit_fork(request, shared, step)
        match = self.kv.match(request, request.max_cached_tokens)
        extra, is_async = (0, False)
        if self.tier_loads is not None:
            extra, is_async = self.tier_loads.match(request, match.num_tokens)
        start = match.num_tokens + extra
        num_tokens = self._chunk(step, start, request.num_tokens - start)
        if num_tokens <= 0 or not self._fits(request, self.kv.blocks_to_admit(request, match)):
            return False
        if not self.kv.admit(request, match, start + num_tokens, step.step_id):
            return False
        self.waiting.remove(request)
        if self.tier_loads is not None and extra:
            self.tier_loads.start(request, match.num_tokens, extra)
            if is_async:
                self.preparation.hold(request, self.tier_loads.is_loaded, self.clock(), "loads from a cache tier")
                return True
            self.tier_loads.finish_sync(request)
        self._start(request, "admitted")
        step.add(request, num_tokens)
        return True

    def _admit_fork(self, request: Request, shared: int, step: Step) -> bool:
        """Start a child from its leader's blocks; it computes the rest of the prompt."""
        leader = request.parent
        assert leader is not None
        rest = request.num_tokens - shared
        if self._chunk(step, shared, rest) < rest:
            return False
        if not self._fits(request, self.kv.blocks_to_fork(request, shared)):
            return False
        if not self.kv.fork(leader, request, shared, step.step_id):
            return False
        if not self.kv.grow(request, request.num_tokens, step.step_id):
            self.kv.free(request)
            return False
        request.num_cached_tokens = leader.num_cached_tokens
        self.waiting.remove(request)
        self._start(request, "forked from its sibling")
        step.add(request, rest)
        return True

    def _fits(self, request: Request, needed: int) -> bool:
        if not self.running:
            return True
        kv = self.kv
        held = kv.num_blocks - kv.num_usable_blocks - kv.num_fenced_blocks
        return self.admission.fits([request], needed, self.running, held)

    def _start(self, request: Request, cause: str) -> None:
        """The request runs from this step on; the data plane gets its whole state with the step."""
        if request.timeline.num_preemptions:
            self.num_recomputed_tokens -= request.num_computed_tokens
        request.move_to(RequestStatus.RUNNING, self.clock(), cause)
        self.running.append(request)
        if self.policy.is_priority:
            self.running.sort(key=self.policy.key)
        request.is_resident = False

    def _make_room(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Get blocks for ``num_tokens`` tokens, preempting those after it in order; False if it must wait or went."""
        if num_tokens <= request.capacity_tokens:
            return True
        while not self.kv.grow(request, num_tokens, step.step_id):
            if self.kv.num_fenced_blocks:
                return False  # memory comes back when a step in flight completes
            victim = self.policy.victim(self._preemptible(step), than=request)
            if victim is None:
                if not self.policy.is_protected(request):
                    self._preempt(request, "no memory for its next token")
                return False
            self._preempt(victim, f"made room for {request.request_id}")
        step.grown.append(request)
        return True

    def _preempt_for(self, request: Request, step: Step) -> bool:
        """An urgent waiting request takes the place of a less urgent running one; True if that freed something now."""
        if not self.policy.is_priority or self.kv.num_fenced_blocks:
            return False
        victim = self.policy.victim(self._preemptible(step), than=request)
        if victim is None or victim.priority <= request.priority:
            return False
        self._preempt(victim, f"made room for urgent {request.request_id}")
        return True

    def _preemptible(self, step: Step) -> Iterable[Request]:
        """Running requests that are not part of the step being composed, nor is any of their group."""
        busy = {request.group_id for request in step.requests if request.group_id is not None}
        for request in self.running:
            if request.last_step_id != step.step_id and request.group_id not in busy:
                yield request

    def _preempt(self, request: Request, cause: str) -> None:
        """Free a request's blocks (and its group's) and queue it again at its old place; it recomputes what the
        cache loses. Samples of its steps in flight still count."""
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
        self.admission.estimator.on_preemption()
        self.drop_finished()

    def _break_deadlock(self) -> None:
        """Nothing runs and nothing is in flight: protected requests hold all memory, so the last of them gives way."""
        if self.running and not self.in_flight and not any(self._can_decode(r) for r in self.running[:1]):
            self._preempt(self.running[-1], "memory deadlock")

    # ---- results --------------------------------------------------------------------------------------------

    def _launch(self, step: Step) -> SchedulerOutput:
        """Complete the delta and put the step in flight."""
        output = step.output
        output.removed_request_ids, self._removed_ids = self._removed_ids, []
        output.block_copies = self.kv.take_block_copies()
        self._describe_changes(step)
        step.count_features()
        self.last_step_id = step.step_id
        self.num_computed_tokens += step.num_tokens
        self.in_flight.append(step)
        return output

    def _describe_changes(self, step: Step) -> None:
        """New requests in full, the others by the blocks and tokens they gained."""
        for request in step.started:
            step.describe_new(request)
            self.kv.take_new_blocks(request)
        for request in step.grown:
            blocks = self.kv.take_new_blocks(request)
            if blocks is not None:
                step.output.new_block_ids[request.request_id] = blocks
        if self._appended_ids:
            scheduled = set(step.output.request_ids)
            step.output.appended_token_ids = {i: t for i, t in self._appended_ids.items() if i in scheduled}
            self._appended_ids = {i: t for i, t in self._appended_ids.items() if i not in scheduled}

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the oldest step's results: commit tokens, stop requests, release memory behind the fence."""
        step = self.in_flight.popleft()
        assert step.step_id == output.step_id, f"results of step {output.step_id} came before step {step.step_id}"
        self.completed_step_id = step.step_id
        self.kv.advance(step.step_id)
        self.cost_model.observe(step.features, output.elapsed_ms)
        return complete_step(self, step, output)

    @property
    def has_requests(self) -> bool:
        """True while any request is not finished."""
        return bool(self.requests)

    def check_integrity(self) -> None:
        """Prove that every request is in exactly one place and that the ledger of blocks adds up. For tests."""
        places = [*self.running, *self.waiting, *self.preparation]
        assert len(places) == len(set(places)) == len(self.requests), "a request is in no place or in two"
        for request in places:
            assert self.requests.get(request.request_id) is request, f"{request.request_id} is not registered"
            assert (request.status is RUNNING) == (request in self.running), f"{request.request_id}: wrong place"
            in_flight = sum(request in step.requests for step in self.in_flight)
            assert request.num_steps_in_flight == in_flight, f"{request.request_id}: steps in flight"
            awaited = sum(request in step.sampled for step in self.in_flight)
            assert request.num_placeholders == awaited, f"{request.request_id}: placeholders"
            known = request.num_tokens + request.num_placeholders
            assert request.num_committed_tokens <= request.num_computed_tokens <= known
            assert request.num_computed_tokens <= max(request.capacity_tokens, 0)
            assert request.num_committed_tokens <= request.num_tokens
        self.kv.check_integrity(places)
