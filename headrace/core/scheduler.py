"""Decides what each step computes. An outline of named steps; features live behind the interfaces it calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.config import SchedulerConfig, SharingConfig
from headrace.core import fork
from headrace.core.admission import Admission
from headrace.core.batching import Stage, make_batching
from headrace.core.cascade import CascadePlanner
from headrace.core.cascade_floor import DEFAULT_FLOOR, CascadeFloor
from headrace.core.completion import complete_step
from headrace.core.cost_model import CostModel, StepFeatures
from headrace.core.interfaces import CacheTier, ChoiceScene, Clock
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.lifecycle import RUNNING, Lifecycle
from headrace.core.micro_batches import MicroBatches
from headrace.core.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from headrace.core.policy import Policy
from headrace.core.prefix_match import PrefixMatch
from headrace.core.prefix_wait import computing_prefix_of
from headrace.core.preparation import TierLoads
from headrace.core.prompt_pace import make_pace
from headrace.core.request import Request
from headrace.core.step import Step
from headrace.errors import CapacityError


class Scheduler:
    """Gives every request tokens until ``num_computed_tokens`` reaches what it knows, within one budget a step.

    ``schedule`` may be called again before the results of earlier steps are in; ``update_from_output`` takes results
    in step order. Who is where is in ``lifecycle``.

    num_micro_batches: more than 1 where stages of a pipeline work on different requests at a time: each step takes a
        part of the running streams, other ones than the steps just before it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        sharing: SharingConfig | None = None,
        tier: CacheTier | None = None,
        cost_model: CostModel | None = None,
        cascade_floor: CascadeFloor = DEFAULT_FLOOR,
        clock: Clock = time.monotonic,
        num_micro_batches: int = 1,
    ) -> None:
        self.micro_batches = MicroBatches(num_micro_batches)
        self.config = config
        self.kv = kv
        self.clock = clock
        self.cost_model = cost_model or CostModel()
        self.cascade = CascadePlanner(
            sharing or SharingConfig(), kv.block_size, self.cost_model, cascade_floor
        )
        self.policy = Policy(config.policy)
        self.batching = make_batching(config.batching, self.cost_model, config.stall_limit_ms)
        self._max_uncommitted_tokens = config.max_chunk_tokens * config.steps_outstanding
        self.admission = Admission(self.policy, kv, self._max_uncommitted_tokens)
        self.lifecycle = Lifecycle(kv, self.policy, clock)
        self.pace = make_pace(config, self.lifecycle, self.admission.estimator, num_micro_batches)
        self.tier_loads = TierLoads(tier)
        self.in_flight: deque[Step] = deque()
        self.last_step_id = 0
        self.num_computed_tokens = 0
        self.watcher: Callable[[StepFeatures, ModelRunnerOutput], None] | None = None

    def add_request(self, request: Request, is_ready: Callable[[Request], bool] | None = None) -> None:
        """Queue a request, held until ``is_ready`` (its grammar is compiled) where that is given.

        Raises: CapacityError when the queue is full or the request can never fit into the KV cache.
        """
        limit = self.config.max_waiting_requests
        if self.lifecycle.num_waiting >= limit:
            raise CapacityError(
                f"{limit} requests are waiting already, the limit max_waiting_requests; try again later",
                code="queue_full",
            )
        most = self.max_request_tokens
        if request.num_prompt_tokens + 1 > most:
            raise CapacityError(
                f"a prompt of {request.num_prompt_tokens} tokens can never fit: the KV cache holds {most} tokens "
                f"of one request; raise kv_cache_bytes or shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        request.max_total_tokens = min(request.max_total_tokens, most)
        self.lifecycle.add(request, is_ready)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer of the longest request that the KV cache holds, as ``longest_request`` has it."""
        return self.kv.max_tokens_of_one_request(self._max_uncommitted_tokens)

    # ---- one step -------------------------------------------------------------------------------------------

    @property
    def waits_for_tier(self) -> bool:
        """Whether a cache tier moves blocks that a request waits for: to have them, or to have their room."""
        return self.tier_loads.is_waiting or bool(
            self.kv.cache.evictor.in_transfer and self.lifecycle.requests
        )

    def schedule(self) -> SchedulerOutput | None:
        """Compose the next step; None when nothing can run before results of earlier steps come in."""
        step = Step(self.last_step_id + 1, self.cascade.num_saved_tokens)
        self.tier_loads.poll()
        self.kv.pins.refresh()
        self.lifecycle.collect_prepared()
        if self.policy.is_priority:
            self._make_way_for_urgent(step)
        num_running = len(self.lifecycle.running)
        for in_turn in self.micro_batches.passes:
            for stages in self.batching.stages(num_running):
                for stage in stages:
                    self._run_stage(stage, step, in_turn)
                if step.requests:
                    return self._launch(step)
        if len(self.lifecycle.running) <= num_running:
            self._break_deadlock()
        return None

    def _run_stage(self, stage: Stage, step: Step, in_turn: bool) -> None:
        if stage is Stage.DECODE:
            self._schedule_decodes(step, in_turn)
        elif stage is Stage.CHUNK:
            self._schedule_chunks(step)
        else:
            self._admit_waiting(step)

    def _schedule_decodes(self, step: Step, in_turn: bool) -> None:
        """Running streams: one token each, memory permitting; a pipeline's micro-batch is a part of them."""
        micro_batches = self.micro_batches
        most, is_split = micro_batches.size(len(self.lifecycle.running)), micro_batches.count > 1
        for request in self.lifecycle.running:
            known = len(request.token_ids) + request.num_placeholders
            start = request.num_computed_tokens
            if known - start != 1 or known >= request.max_total_tokens or request.status is not RUNNING:
                continue
            if request.must_wait:
                continue
            if is_split and micro_batches.must_wait(request, step.step_id, in_turn):
                continue
            if len(step.requests) >= most:
                break
            if request.group_id is not None:
                self._schedule_group(step, request.group_id)
            elif start < request.capacity_tokens or self._make_room(request, known, step):
                step.add(request, 1)
        step.num_decodes = len(step.requests)

    def _schedule_group(self, step: Step, group_id: str) -> None:
        """A co-schedule group decodes together or not at all; its members' last tokens are computed here only."""
        members = [request for request in self.lifecycle.requests.values() if request.group_id == group_id]
        if any(not _can_decode(member) or member.last_step_id == step.step_id for member in members):
            return
        if all(self._make_room(member, member.num_computed_tokens + 1, step) for member in members):
            for member in members:
                step.add(member, 1)

    def _schedule_chunks(self, step: Step) -> None:
        """Running requests with several tokens to compute, in order, as far as the budget goes."""
        if len(step.requests) == len(self.lifecycle.running):
            return  # all decode
        unfinished = [request for request in self.lifecycle.running if _wants_chunk(request, step)]
        for index, request in enumerate(unfinished):
            if request.status is not RUNNING:
                continue  # preempted for one before it
            start = request.num_computed_tokens
            wanted = request.num_tokens + request.num_placeholders - start - _held_back(request)
            wanted = self.pace.cut(request, start, wanted, step)
            if not wanted:
                continue  # prompts have had their share; a stream may follow
            num_tokens = self._chunk(step, start, wanted, unfinished[index + 1 :])
            if num_tokens <= 0:
                return
            if self._make_room(request, start + num_tokens, step):
                step.add(request, num_tokens)

    def _chunk(self, step: Step, start: int, wanted: int, others: list[Request]) -> int:
        """How many of a request's next ``wanted`` tokens may join the step, before ``others`` that run."""
        most = min(wanted, self.config.max_step_tokens - step.num_tokens)
        most = min(most, self.config.max_chunk_tokens)
        if most <= 0:
            return 0
        step.count_features()
        num_tokens = self.batching.chunk_tokens(step.num_decodes, step.features, start, most, False)
        if num_tokens < wanted and self._has_shorter(wanted, others):
            num_tokens = self.batching.chunk_tokens(step.num_decodes, step.features, start, most, True)
        return num_tokens

    def _has_shorter(self, num_tokens: int, others: list[Request]) -> bool:
        """Whether one of the ``others``, or the one that starts next, has fewer than ``num_tokens`` to compute."""
        if any(other.num_tokens - other.num_computed_tokens < num_tokens for other in others):
            return True
        first = self.lifecycle.waiting.peek()
        return first is not None and first.num_tokens - self.kv.cached_tokens(first) < num_tokens

    # ---- admission ------------------------------------------------------------------------------------------

    def _admit_waiting(self, step: Step) -> None:
        """Waiting requests in policy order, until one does not fit; nobody overtakes it."""
        while step.num_tokens < self.config.max_step_tokens:
            request = self.lifecycle.waiting.peek()
            if request is None or request.num_steps_in_flight:
                return
            if not self._has_seat() or not self._admit(request, step):
                return

    def _admit(self, request: Request, step: Step) -> bool:
        """Start a waiting request in this step; False if budget or memory do not allow it."""
        shared = fork.fork_length(request, step)
        if shared is not None and request.parent is not None and self.kv.can_fork(request.parent, shared):
            return self._admit_fork(request.parent, request, shared, step)
        if not self.pace.room(step):
            return False
        match = self.kv.match(request, request.max_cached_tokens)
        is_ready = self._prefix_to_wait_for(request, match)
        if is_ready is not None:
            self.lifecycle.prepare(request, is_ready, "waits for a prefix that another request computes")
            return True
        extra, is_async = self.tier_loads.match(request, match.num_tokens)
        start = match.num_tokens + extra
        wanted = request.num_tokens - start - _held_back(request)
        wanted = self.pace.cut(request, start, wanted, step)
        num_tokens = self._chunk(step, start, wanted, [])
        if num_tokens < min(wanted, 1) or not self._fits(request, self._held_by_others(match)):
            return False
        if not self.kv.admit(request, match, start + num_tokens, step.step_id):
            return False
        is_ready = self.tier_loads.start(request, match.num_tokens, extra, is_async)
        if is_ready is not None:
            self.lifecycle.prepare(request, is_ready, "loads from a cache tier")
            return True
        self.lifecycle.start(request, "admitted")
        if num_tokens:
            step.add(request, num_tokens)
        return True

    def _admit_fork(self, leader: Request, request: Request, shared: int, step: Step) -> bool:
        """Start a child from its leader's blocks; it computes the rest of the prompt."""
        rest = request.num_tokens - shared
        num_shared_blocks = shared // self.kv.block_size * len(self.kv.specs)
        if self._chunk(step, shared, rest, []) < rest or not self._fits(request, num_shared_blocks):
            return False
        if not self.kv.fork(leader, request, shared, step.step_id):
            return False
        if not self.kv.grow(request, request.num_tokens):
            self.kv.free(request)
            request.num_computed_tokens = request.num_committed_tokens = 0
            return False
        request.num_cached_tokens = leader.num_cached_tokens
        self.lifecycle.start(request, "forked from its sibling")
        step.add(request, rest)
        return True

    def _prefix_to_wait_for(self, request: Request, match: PrefixMatch) -> Callable[[Request], bool] | None:
        if not self.kv.is_prefix_caching_enabled or request.timeline.num_preemptions:
            return None
        loading = [other for other in self.lifecycle.preparation if other.block_table]
        others = [*self.lifecycle.running, *loading]
        return computing_prefix_of(request, match.num_tokens, others, self.cost_model)

    def _fits(self, request: Request, num_cached_blocks: int) -> bool:
        """True if memory holds the request beside what is promised to the running ones."""
        running = self.lifecycle.running
        return not running or self.admission.fits(request, num_cached_blocks, running)

    def _held_by_others(self, match: PrefixMatch) -> int:
        """Matched blocks that running requests hold anyhow."""
        num_matched = sum(len(ids) - ids.count(-1) for ids in match.block_ids)
        return num_matched - self.kv.cache.pinned_by(match)

    # ---- memory pressure ------------------------------------------------------------------------------------

    def _make_room(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Get blocks for ``num_tokens`` tokens, preempting those after it in order; False if it must wait or went."""
        if num_tokens <= request.capacity_tokens:
            return True
        while not self.kv.grow(request, num_tokens):
            if self.kv.num_fenced_blocks:
                return False  # memory comes back when a step in flight completes
            others = (
                r for r in self._preemptible(step) if r.group_id is None or r.group_id != request.group_id
            )
            victim = self.policy.victim(others, than=request)
            if victim is None:
                if not self.policy.is_protected(request):
                    self._preempt(request, "no memory for its next token")
                return False
            self._preempt(victim, f"made room for {request.request_id}")
        return True

    def _make_way_for_urgent(self, step: Step) -> None:
        """The first waiting request takes the place of less urgent running ones if there is no other room for it."""
        request = self.lifecycle.waiting.peek()
        while request is not None and not (self._has_seat() and self._fits(request, 0)):
            victim = self.policy.victim(self._preemptible(step), than=request)
            if victim is None or victim.priority <= request.priority:
                return
            self._preempt(victim, f"made way for urgent {request.request_id}")

    def _has_seat(self) -> bool:
        return len(self.lifecycle.running) < self.config.max_seats

    def _preemptible(self, step: Step) -> Iterable[Request]:
        """Running requests that are not part of the step being composed, nor is any of their group."""
        busy = {request.group_id for request in step.requests if request.group_id is not None}
        for request in self.lifecycle.running:
            if request.last_step_id != step.step_id and request.group_id not in busy:
                yield request

    def _preempt(self, request: Request, cause: str) -> None:
        self.lifecycle.preempt(request, cause)
        self.admission.estimator.on_preemption()

    def _break_deadlock(self) -> None:
        """Nothing runs and nothing is in flight: protected requests hold all memory, or parts of groups hold all seats.
        The last in order gives way. If nothing runs but something waits, pins hold what it needs."""
        running = self.lifecycle.running
        if running and not self.in_flight:
            self._preempt(max(running, key=self.policy.key), "deadlock")
        elif not self.in_flight and len(self.lifecycle.waiting) and not self.kv.cache.evictor.in_transfer:
            self.kv.pins.release_oldest()

    # ---- out and in -----------------------------------------------------------------------------------------

    def _launch(self, step: Step) -> SchedulerOutput:
        """Complete the delta and put the step in flight."""
        lifecycle, output = self.lifecycle, step.output
        output.removed_request_ids, lifecycle.removed_ids = lifecycle.removed_ids, []
        output.block_copies = self.kv.take_block_copies()
        for request in step.grown:
            blocks = self.kv.take_new_blocks(request)
            if blocks is not None:
                output.new_block_ids[request.request_id] = blocks
        for request in step.started:
            self.kv.take_new_blocks(request)
            step.describe_new(request)
        for request in step.requests if lifecycle.appended_ids else ():
            if request.request_id in lifecycle.appended_ids:
                output.appended_token_ids[request.request_id] = lifecycle.appended_ids.pop(request.request_id)
                if request.request_id in lifecycle.kept_tokens:
                    output.kept_tokens[request.request_id] = lifecycle.kept_tokens.pop(request.request_id)
        self.cascade.fill(step)
        step.count_features()
        self.last_step_id = step.step_id
        self.num_computed_tokens += step.num_tokens
        self.in_flight.append(step)
        return output

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the oldest step's results: commit tokens, stop requests, release memory behind the fence."""
        step = self.in_flight.popleft()
        assert step.step_id == output.step_id, (
            f"results of step {output.step_id} came before step {step.step_id}"
        )
        self.kv.advance(step.step_id)
        if not output.is_preparing:
            self.cost_model.observe(step.features, output.elapsed_ms)
        if self.watcher is not None:
            self.watcher(step.features, output)
        scene = ChoiceScene(self.lifecycle, self.last_step_id + 1, self.config.max_seats, self.clock())
        return complete_step(scene, self.admission.estimator, step, output)

    def check_integrity(self) -> None:
        """Prove that requests, steps in flight and the ledger of blocks agree. For tests."""
        self.lifecycle.check_integrity()
        for request in self.lifecycle.requests.values():
            in_flight = sum(request in step.requests for step in self.in_flight)
            assert request.num_steps_in_flight == in_flight, f"{request.request_id}: steps in flight"
            awaited = sum(request in step.sampled and request not in step.foreseen for step in self.in_flight)
            assert request.num_placeholders == awaited, f"{request.request_id}: placeholders"


def _wants_chunk(request: Request, step: Step) -> bool:
    """It has more to compute than a decode gives it, and did not get it in this step."""
    held_back = _held_back(request)
    wanted = request.num_tokens + request.num_placeholders - request.num_computed_tokens - held_back
    return wanted >= 2 - held_back and request.last_step_id != step.step_id and not request.must_wait


def _held_back(request: Request) -> int:
    """Tokens at its end that a request computes with its co-schedule group only."""
    return 0 if request.group_id is None else 1


def _can_decode(request: Request) -> bool:
    known = len(request.token_ids) + request.num_placeholders
    is_next = known - request.num_computed_tokens == 1 and known < request.max_total_tokens
    return request.status is RUNNING and is_next and not request.must_wait
