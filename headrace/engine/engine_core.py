"""The engine's heart: requests in, steps run, news out. Synchronous, one thread; clients drive it."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future

import msgspec

from headrace.core import fork
from headrace.core.completion import finish
from headrace.core.interfaces import Executor, MaskSource
from headrace.core.output import EngineCoreOutput, EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler import Scheduler
from headrace.errors import EngineDeadError, RequestError


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
    prefix_query_tokens: int
    prefix_hit_tokens: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks that running requests hold."""
        return self.num_held_blocks / self.num_kv_blocks


class EngineCore:
    """Runs steps over an executor, keeping up to ``max_steps_outstanding`` of them in flight.

    Args:
        mask_source: gives grammar masks between a step's two calls; None when nothing is constrained.
        seed: of the random streams of requests that bring no seed; None draws one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        mask_source: MaskSource | None = None,
        seed: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._mask_source = mask_source
        self._seeds = random.Random(seed)
        self._max_outstanding = scheduler.config.steps_outstanding
        self._in_flight: deque[tuple[Future[None], Future[ModelRunnerOutput]]] = deque()
        self._families: dict[str, list[Request]] = {}
        self._pending: list[EngineCoreOutput] = []
        self._failure: BaseException | None = None

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises: RequestError when the id is in use; CapacityError when there is no room for it.
        """
        if core_request.request_id in self._families:
            raise RequestError(f"request id {core_request.request_id!r} is in use", param="request_id")
        seed = core_request.sampling_params.seed
        family = fork.make_requests(core_request, self._seeds.getrandbits(63) if seed is None else seed)
        added: list[Request] = []
        try:
            for request in family:
                self.scheduler.add_request(request)
                added.append(request)
        except RequestError:
            for request in added:
                self.scheduler.lifecycle.finish(request, FinishReason.ABORT)
            raise
        self._families[core_request.request_id] = family

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
        if not request.is_finished:
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
        while len(self._in_flight) < self._max_outstanding:
            scheduler_output = self.scheduler.schedule()
            if scheduler_output is None:
                break
            self._launch(scheduler_output)
        news, self._pending = self._pending, []
        if self._in_flight:
            forward, samples = self._in_flight.popleft()
            forward.result()
            news += self._take_in(samples.result())
        return news

    def _launch(self, scheduler_output: SchedulerOutput) -> None:
        """The two calls of a step; grammar masks are filled while the forward runs."""
        forward = self.executor.execute_model(scheduler_output)
        mask = self._mask_source.fill(scheduler_output) if self._mask_source else None
        self._in_flight.append((forward, self.executor.sample_tokens(mask)))

    def _take_in(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        news = self.scheduler.update_from_output(output)
        if self._mask_source is not None:
            self._advance_matchers(self._mask_source, news)
        for item in news:
            if item.finish_reason is not None:
                self._forget_finished(item.request_id)
        return news

    def _advance_matchers(self, mask_source: MaskSource, news: list[EngineCoreOutput]) -> None:
        """Matchers follow committed tokens only, here and nowhere else."""
        for item in news:
            request = self._families[item.request_id][item.child_index]
            if item.new_token_ids:
                mask_source.accept(request, item.new_token_ids)
            if request.is_finished:
                mask_source.release(request)

    def _release(self, request: Request) -> None:
        if self._mask_source is not None:
            self._mask_source.release(request)

    def _forget_finished(self, request_id: str) -> None:
        family = self._families.get(request_id)
        if family is not None and all(request.is_finished for request in family):
            del self._families[request_id]

    def reset_prefix_cache(self) -> bool:
        """Drop every cached block that no request uses; True if the cache is empty now."""
        return self.scheduler.kv.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """A snapshot of queues, memory and counters."""
        scheduler, lifecycle, kv = self.scheduler, self.scheduler.lifecycle, self.scheduler.kv
        cache = kv.stats()
        return EngineStats(
            num_running=len(lifecycle.running),
            num_waiting=lifecycle.num_waiting,
            num_kv_blocks=kv.num_blocks,
            num_held_blocks=kv.num_blocks - kv.num_usable_blocks - kv.num_fenced_blocks,
            num_cached_blocks=kv.num_evictable_blocks,
            num_fenced_blocks=kv.num_fenced_blocks,
            num_steps=scheduler.last_step_id,
            num_preemptions=lifecycle.num_preemptions,
            num_computed_tokens=scheduler.num_computed_tokens,
            num_recomputed_tokens=lifecycle.num_recomputed_tokens,
            prefix_query_tokens=cache.num_query_tokens,
            prefix_hit_tokens=cache.num_hit_tokens,
        )

    def shutdown(self) -> None:
        """Stop the executor. Requests still running get no more outputs."""
        self._in_flight.clear()
        self.executor.shutdown()
