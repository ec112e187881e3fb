"""The engine's heart: requests in, steps run, news out. Synchronous, one thread; clients drive it."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from headrace.core import fork
from headrace.core.beam_search import BeamSearch
from headrace.core.cache_admin import CacheAdmin
from headrace.core.cache_tiers import TieredCache
from headrace.core.completion import finish
from headrace.core.interfaces import Executor, MaskSource
from headrace.core.output import EngineCoreOutput, EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler import Scheduler
from headrace.engine.constrained_steps import ConstrainedSteps
from headrace.errors import EngineDeadError, GrammarError, HeadraceError, RequestError
from headrace.structured_outputs import Constraint


class EngineStats(msgspec.Struct):
    """A snapshot for metrics and benchmarks. Counts rise from the start; the others are of now."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_fenced_blocks: int
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_forced_tokens: int
    num_constraint_violations: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    num_disk_bytes: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    num_stored_blocks: int = 0
    num_failed_blocks: int = 0
    num_weight_updates: int = 0
    max_request_tokens: int = sys.maxsize
    rank_memory_bytes: list[int] = []
    startup_s: dict[str, float] = {}


REQUESTS_UNFINISHED = "requests_unfinished"
"""``RequestError.code`` of an update of weights that comes too early."""

_LOAD_LOOK_S = 5e-4
"""How often an engine that has nothing to compute looks whether blocks have come from a tier."""


class EngineCore:
    """Runs steps over an executor, keeping up to ``max_steps_outstanding`` of them in flight.

    Args:
        mask_source: gives grammar masks between a step's two calls; None refuses requests with a constraint.
        tiers: the cache tiers that the scheduler uses; told of resets, and ended with the engine.
        seed: of the random streams of requests that bring no seed; None draws one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        mask_source: MaskSource | None = None,
        tiers: TieredCache | None = None,
        seed: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._mask_source = mask_source
        self._tiers = tiers
        self._constrained = ConstrainedSteps(scheduler, mask_source) if mask_source is not None else None
        self._seeds = random.Random(seed)
        self._max_outstanding = scheduler.config.steps_outstanding
        self._in_flight: deque[tuple[Future[None], Future[ModelRunnerOutput]]] = deque()
        self._families: dict[str, list[Request]] = {}
        self._pending: list[EngineCoreOutput] = []
        self._failure: BaseException | None = None
        self.num_weight_updates = 0

    @property
    def stream_interval(self) -> int | None:
        """Steps whose tokens go out together; None: as many as suit the number of streams."""
        return self.scheduler.config.stream_interval

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises: RequestError when the id is in use; CapacityError when there is no room for it; GrammarError when this
        engine has no grammars.
        """
        if core_request.request_id in self._families:
            raise RequestError(f"request id {core_request.request_id!r} is in use", param="request_id")
        family = fork.make_requests(core_request, self.settle_seed(core_request))
        if core_request.sampling_params.use_beam_search:
            BeamSearch.start(family[0], core_request, self.scheduler.kv, self.scheduler.config.max_seats)
        added: list[Request] = []
        is_ready = self._start_constraint(family, core_request.constraint)
        try:
            for request in family:
                self.scheduler.add_request(request, is_ready)
                added.append(request)
        except RequestError:
            for request in added:
                self.scheduler.lifecycle.finish(request, FinishReason.ABORT)
            for request in family:
                self._release(request)
            raise
        self._families[core_request.request_id] = family

    def settle_seed(self, core_request: EngineCoreRequest) -> int:
        """The seed of a request's random stream: its own, or one that is drawn when this is first asked. Seeds follow
        the order of these calls, whenever and however often the requests are added after it."""
        if core_request.sample_seed is None:
            own = core_request.sampling_params.seed
            core_request.sample_seed = self._seeds.getrandbits(63) if own is None else own
        return core_request.sample_seed

    def _start_constraint(
        self, family: list[Request], constraint: Constraint | None
    ) -> Callable[[Request], bool] | None:
        """Begin to compile what the answers must be; the test that says when they may be scheduled."""
        if constraint is None:
            return None
        if self._mask_source is None:
            raise GrammarError(
                "this engine has no grammars: leave structured_outputs out", param="structured_outputs"
            )
        for request in family:
            # With two steps in flight its mask waits for the step before, beside the forward; with more it would hold
            # up the others' steps, so it waits itself.
            request.may_run_ahead = request.may_run_ahead and self._max_outstanding <= 2
            self._mask_source.start(request, constraint)
        return self._mask_source.is_ready

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests with all their children at once; unknown ids are ignored. Each gets a final output."""
        self._check_alive()
        for request_id in request_ids:
            for request in self._families.pop(request_id, []):
                self._abort(request)
        self.scheduler.lifecycle.drop_stopped()

    def abort_child(self, request_id: str, child_index: int) -> None:
        """End one answer of a request (its text met a stop string); its siblings go on."""
        for request in self._families.get(request_id, []):
            if request.child_index == child_index:
                self._abort(request)
        self.scheduler.lifecycle.drop_stopped()
        self._forget_finished(request_id)

    def _abort(self, request: Request) -> None:
        if request.chooser is not None:
            self._pending += request.chooser.end(self.scheduler.lifecycle, FinishReason.ABORT)
        elif not request.is_finished:
            item = EngineCoreOutput(request.parent_id, request.child_index)
            finish(self.scheduler.lifecycle, request, item, FinishReason.ABORT)
            self._release(request)
            self._pending.append(item)

    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self._in_flight or self._pending or self.scheduler.lifecycle.requests)

    def step(self) -> list[EngineCoreOutput]:
        """Keep the device fed, then take in the oldest step's results; the news since the last call.

        Raises: EngineDeadError when the executor failed, or when an earlier step was broken off: what an exception (a
        KeyboardInterrupt, say) leaves half done cannot be trusted.
        """
        self._check_alive()
        try:
            return self._step()
        except BaseException as error:
            self._failure = error
            raise

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(
                f"a step was broken off by {type(self._failure).__name__}; make a new engine"
            )
        self.executor.check_alive()

    def _step(self) -> list[EngineCoreOutput]:
        if self._constrained is not None:
            self._take(self._constrained.prepare())
        has_results = False
        most = 1 if self.executor.is_compiling else self._max_outstanding
        while len(self._in_flight) < most and not has_results:
            scheduler_output = self.scheduler.schedule()
            if scheduler_output is None:
                break
            has_results = self._launch(scheduler_output)
        if self._in_flight and not has_results:
            self._take_in_oldest()
        elif not self._in_flight and self._mask_source is not None and not self._pending:
            self._mask_source.wait_prepared()
        if self.scheduler.waits_for_tier and not self._in_flight and not self._pending:
            time.sleep(_LOAD_LOOK_S)  # nothing to compute until blocks have come from a tier, or gone to it
        news, self._pending = self._pending, []
        return news

    def _launch(self, scheduler_output: SchedulerOutput) -> bool:
        """The two calls of a step; grammar masks are filled while the forward runs. True if that took in the results of
        earlier steps, on which the masks depend."""
        forward = self.executor.execute_model(scheduler_output)
        has_results, mask = False, None
        if self._mask_source is not None:
            while self._in_flight and self._mask_source.awaits_results(scheduler_output):
                self._take_in_oldest()
                has_results = True
            mask = self._mask_source.fill(scheduler_output)
        self._in_flight.append((forward, self.executor.sample_tokens(mask)))
        return has_results

    def _take_in_oldest(self) -> None:
        """Wait for the oldest step in flight; its results become news."""
        forward, samples = self._in_flight.popleft()
        forward.result()
        news = self.scheduler.update_from_output(samples.result())
        if self._constrained is not None:
            news += self._constrained.advance(news, self._request_of)
        self._take(news)

    def _take(self, news: list[EngineCoreOutput]) -> None:
        self._pending += news
        for item in news:
            if item.finish_reason is not None:
                self._forget_finished(item.request_id)

    def _request_of(self, item: EngineCoreOutput) -> Request:
        family = self._families[item.request_id]
        return family[min(item.child_index, len(family) - 1)]  # answers of a beam search have one request

    def _release(self, request: Request) -> None:
        if self._mask_source is not None:
            self._mask_source.release(request)

    def _forget_finished(self, request_id: str) -> None:
        family = self._families.get(request_id)
        if family is not None and all(request.is_finished for request in family):
            del self._families[request_id]

    def use_idle_time(self) -> bool:
        """A piece of what can be done before requests need it; False when there is nothing left to do."""
        return self.executor.take_pages(*self.scheduler.kv.pool.free_range)

    def call_cache(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ask something of the prefix cache by name: ``reset``, or an action of ``CacheAdmin``. Raises RequestError."""
        if action == "reset":
            return {"is_empty": self.reset_prefix_cache()}
        return CacheAdmin(self.scheduler.kv, self._tiers).call(action, arguments)

    def reset_prefix_cache(self) -> bool:
        """Drop every cached block that no request uses, in all tiers; True if the device's cache is empty now."""
        if self._tiers is not None:
            self._tiers.reset()
        return self.scheduler.kv.reset_prefix_cache()

    def update_weights(self, model: str | None = None) -> None:
        """Replace the model's weights by those of another folder or file of the same model; None: read the same files
        again. The prefix cache is empty after it, in host memory too; files on disk wait for the weights they are of.

        Raises:
            RequestError: requests are unfinished.
            CheckpointError, ConfigError, DeviceMemoryError: the weights cannot be used; nothing was changed.
            EngineDeadError: the old weights are gone, and the new ones could not be loaded.
        """
        self._check_alive()
        while self._in_flight and not self._families:
            self._take_in_oldest()  # steps that only results of finished requests come from
        if num_unfinished := max(len(self._families), len(self.scheduler.lifecycle.requests)):
            raise RequestError(
                f"{num_unfinished} requests are unfinished, and their answers would be of two models; wait for "
                "them or abort them, then update the weights",
                code=REQUESTS_UNFINISHED,
            )
        try:
            self.executor.update_weights(model)
        except HeadraceError as error:
            if isinstance(error, EngineDeadError):
                self._failure = error
            raise
        except BaseException as error:
            self._failure = error
            raise
        self.num_weight_updates += 1
        self._forget_old_weights()

    def _forget_old_weights(self) -> None:
        """Nothing that was computed with them is read any more, or the engine ends."""
        try:
            is_empty = self.scheduler.kv.reset_prefix_cache()
            assert is_empty, "a prefix of the old weights is in use"
            if self._tiers is not None:
                self._tiers.renew()
        except BaseException as error:
            self._failure = error
            raise EngineDeadError(
                f"the weights were replaced, but what is cached of the old ones could not be dropped: {error}"
            ) from error
        self.scheduler.cost_model.forget_pace()

    def stats(self) -> EngineStats:
        """A snapshot of queues, memory and counters."""
        scheduler, lifecycle, kv = self.scheduler, self.scheduler.lifecycle, self.scheduler.kv
        cache = kv.stats()
        return EngineStats(
            rank_memory_bytes=self.executor.rank_memory_bytes(),
            startup_s=self.executor.startup_s(),
            num_running=len(lifecycle.running),
            num_waiting=lifecycle.num_waiting,
            num_kv_blocks=kv.num_blocks,
            max_request_tokens=scheduler.max_request_tokens,
            num_held_blocks=kv.num_blocks - kv.num_usable_blocks - kv.num_fenced_blocks,
            num_cached_blocks=kv.num_evictable_blocks,
            num_fenced_blocks=kv.num_fenced_blocks,
            num_steps=scheduler.last_step_id,
            num_weight_updates=self.num_weight_updates,
            num_preemptions=lifecycle.num_preemptions,
            num_computed_tokens=scheduler.num_computed_tokens,
            num_recomputed_tokens=lifecycle.num_recomputed_tokens,
            num_forced_tokens=self._constrained.num_forced_tokens if self._constrained else 0,
            num_constraint_violations=self._constrained.num_violations if self._constrained else 0,
            prefix_query_tokens=cache.num_query_tokens,
            prefix_hit_tokens=cache.num_hit_tokens,
            **({} if self._tiers is None else msgspec.structs.asdict(self._tiers.stats())),
        )

    def shutdown(self) -> None:
        """Stop the executor. Requests still running get no more outputs."""
        self._in_flight.clear()
        if self._tiers is not None:
            self._tiers.shutdown()
        if self._mask_source is not None:
            self._mask_source.shutdown()
        self.executor.shutdown()
