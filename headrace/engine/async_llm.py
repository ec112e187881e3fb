"""AsyncLLM: many requests at once on one event loop, over an engine core in its own process or thread."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreOutput, ErrorKind
from headrace.engine.client import EngineCoreClient, refusal_error
from headrace.engine.front_end import FrontEnd
from headrace.engine.input_processor import ProcessedInput
from headrace.engine.live_request import LiveRequest
from headrace.engine.mailbox import Mailbox
from headrace.engine.messages import (
    CacheCall,
    CallReply,
    CoreReady,
    CoreSpec,
    LoadProgress,
    Refusal,
    StepNews,
    UpdateWeights,
)
from headrace.engine.output_processor import RequestOutputKind, is_read_whole
from headrace.engine.process_client import ProcessClient
from headrace.engine.prompts import ParsedPrompt, Prompt
from headrace.errors import EngineDeadError, HeadraceError, RequestError
from headrace.observe.metrics import ServingMetrics
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams

ENGINE_CORE = "headrace.engine.assemble:build_engine_core"
_LONG_TEXT_CHARS = 8192
_MANY_WORDS = 16
_GONE_WITH_THE_CORE = (
    "num_running",
    "num_waiting",
    "num_held_blocks",
    "num_cached_blocks",
    "num_host_blocks",
)


class AsyncLLM:
    """Answers requests as they come. Use it from one event loop.

    The engine starts loading when the object is made; requests may be given at once and wait for it.

    Args:
        config: of the engine that ``client`` reaches.
        metrics: filled as requests run.
    """

    def __init__(self, config: EngineConfig, client: EngineCoreClient) -> None:
        self.config = config
        self.metrics = ServingMetrics()
        self.progress = LoadProgress("starting the engine")
        self._client = client
        self._live: dict[str, LiveRequest] = {}
        self._core_ids: dict[str, str] = {}
        self._serial = itertools.count()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._death: HeadraceError | None = None
        self._front_end: FrontEnd | None = None
        self._opening: asyncio.Task[FrontEnd] | None = None
        self._is_core_ready = False
        self._core_settled = asyncio.Event()
        self._has_died = asyncio.Event()

    @classmethod
    def from_config(cls, config: EngineConfig, *, in_process: bool = False) -> AsyncLLM:
        """Start an engine: in a process of its own, or in a thread of this one (which then imports torch).

        Whatever is wrong with the model is raised by the first call that needs it.
        """
        spec = CoreSpec(ENGINE_CORE, config)
        if not in_process:
            return cls(config, ProcessClient(spec))
        from headrace.engine.thread_client import ThreadClient

        return cls(config, ThreadClient(spec))

    # ---- life

    async def front_end(self) -> FrontEnd:
        """The model's tokenizer and limits, read in a thread at the first call.

        Raises: CheckpointError, ConfigError.
        """
        if self._front_end is None:
            if self._opening is None:
                self._client.listen(self)
                self._opening = asyncio.create_task(asyncio.to_thread(FrontEnd.open, self.config.model))
            self._front_end = await asyncio.shield(self._opening)
        return self._front_end

    async def wait_ready(self) -> None:
        """Return when the engine takes steps. Raises what ended its loading."""
        await self.front_end()
        await self._core_settled.wait()
        self.check_alive()

    async def wait_death(self) -> HeadraceError:
        """Return what ended the engine, once it has ended."""
        await self._has_died.wait()
        assert self._death is not None
        return self._death

    @property
    def is_ready(self) -> bool:
        """True when a request would be computed at once."""
        return self._front_end is not None and self._is_core_ready and self._death is None

    @property
    def num_unfinished(self) -> int:
        """Requests whose reader is still waiting for news."""
        return len(self._live)

    def check_alive(self) -> None:
        """Raises the error that ended the engine, if it has ended."""
        if self._death is not None:
            raise self._death

    async def call_cache(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Ask something of the prefix cache: ``reset``, or an action of ``CacheAdmin``.

        Raises: RequestError for wrong arguments; what ended the engine.
        """
        return await self._call(CacheCall(next(self._serial), action, arguments))

    async def update_weights(self, model: str | Path | None = None) -> None:
        """Replace the model's weights, as ``LLM.update_weights`` does. Requests that come meanwhile wait for them.

        Raises: RequestError while requests are unfinished; CheckpointError, ConfigError or DeviceMemoryError for
            weights that cannot be used, while the old ones go on; what ended the engine.
        """
        await self._call(UpdateWeights(next(self._serial), None if model is None else str(model)))

    async def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the engine; requests still running fail with EngineDeadError. Calling twice is allowed."""
        self.on_death(EngineDeadError("the engine was shut down"))
        self._client.shutdown(timeout_s if self._is_core_ready else 0.0)  # one that loads would not listen
        if self._opening is not None:
            await asyncio.wait([self._opening])

    # ---- requests

    async def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt; an output at each step with news. Leaving the iteration early aborts the request.

        Args:
            priority: lower first; counts with ``policy="priority"``.
            kind: whether outputs hold everything so far, the new part, or come once.

        Raises: RequestError for a wrong request, CapacityError when there is no room, EngineDeadError.
        """
        params = sampling_params or SamplingParams()
        mailbox = await self.submit(
            [prompt], params, kind, request_id=request_id, priority=priority, tenant=tenant
        )
        try:
            while not mailbox.is_done:
                for _, output in await mailbox.get():
                    yield output
        finally:
            mailbox.close()

    async def submit(
        self,
        prompts: Sequence[Prompt | ParsedPrompt],
        params: SamplingParams,
        kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        clamp_max_tokens: bool = True,
    ) -> Mailbox:
        """Hand over prompts that share parameters and a reader, who must close the mailbox. All or none are taken.

        Raises: RequestError before anything runs if one of them is wrong; EngineDeadError.
        """
        front_end = await self.front_end()
        self.check_alive()
        if priority and self.config.scheduler.policy != "priority":
            raise RequestError(
                f"priority is {priority}, but this engine serves first come, first served; leave it out, or start the "
                "engine with policy 'priority'",
                param="priority",
            )
        base_id, arrival_time = request_id or uuid.uuid4().hex, time.monotonic()
        ids = [base_id] if len(prompts) == 1 else [f"{base_id}-{index}" for index in range(len(prompts))]

        def process() -> list[ProcessedInput]:
            return [
                front_end.inputs.process(
                    f"{own_id}/{next(self._serial)}",
                    prompt,
                    params,
                    clamp_max_tokens=clamp_max_tokens,
                    arrival_time=arrival_time,
                    priority=priority,
                    tenant=tenant,
                )
                for own_id, prompt in zip(ids, prompts, strict=True)
            ]

        is_long = (
            sum(map(_text_length, prompts)) > _LONG_TEXT_CHARS or len(params.bad_words or ()) > _MANY_WORDS
        )
        # Tokenizing a long text takes as long as several steps; other requests' streams must not wait for it.
        inputs = await asyncio.to_thread(process) if is_long else process()
        return self._launch(front_end, ids, inputs, kind)

    def _launch(
        self, front_end: FrontEnd, user_ids: list[str], inputs: list[ProcessedInput], kind: RequestOutputKind
    ) -> Mailbox:
        ids = [item.request.request_id for item in inputs]
        for own_id in user_ids:
            if own_id in self._core_ids:
                raise RequestError(f"request id {own_id!r} is in use", param="request_id")
        self.check_alive()
        mailbox = Mailbox(len(inputs), kind is RequestOutputKind.DELTA, lambda: self._drop(ids))
        for index, (request, prompt) in enumerate(inputs):
            request.is_read_whole = is_read_whole(request.sampling_params, kind)
            self._client.add_request(request)
            front_end.outputs.add_request(request, prompt, kind)
            self._live[request.request_id] = LiveRequest(
                user_ids[index], request, mailbox, index, self.metrics
            )
            self._core_ids[user_ids[index]] = request.request_id
        return mailbox

    def abort(self, request_id: str) -> None:
        """Stop a request; its reader gets a last output with ``finish_reason`` "abort"."""
        core_id = self._core_ids.get(request_id)
        if core_id is not None and self._front_end is not None:
            live = self._live[core_id]
            last = self._front_end.outputs.end(core_id, "abort")
            if last is not None:
                last.request_id = request_id
                live.mailbox.put(live.index, last)
            self._drop([core_id])

    def _forget(self, core_id: str) -> LiveRequest | None:
        live = self._live.pop(core_id, None)
        if live is not None:
            del self._core_ids[live.user_id]
        return live

    def _drop(self, ids: list[str]) -> None:
        """Forget requests that have no reader any more, and have the core stop those it still computes."""
        assert self._front_end is not None
        left = [own_id for own_id in ids if own_id in self._live and not self._live[own_id].is_answered]
        for own_id in left:
            self._front_end.outputs.end(own_id, "abort")
            live = self._live[own_id]
            self._forget(own_id)
            live.count_ends("abort")
        if left:
            self._client.abort_requests(left)

    # ---- news of the core

    def on_progress(self, progress: LoadProgress) -> None:
        """Loading went on."""
        self.progress = progress

    def on_ready(self, ready: CoreReady) -> None:
        """The core takes steps now."""
        self._is_core_ready = self.metrics.is_engine_up = True
        self.metrics.core_stats = ready.stats
        self._core_settled.set()

    def on_step(self, news: StepNews) -> None:
        """One step's outputs: to their readers, and into the metrics."""
        if news.stats is not None:
            self.metrics.core_stats = news.stats
        assert self._front_end is not None
        for item in news.outputs:
            if item.refusal is not None:
                self._refuse(item, item.refusal)
        for num_tokens in news.step_tokens:
            self.metrics.count_step(num_tokens)
        processed = self._front_end.outputs.process(news.outputs)
        self.metrics.num_invalid_answers = self._front_end.outputs.num_violations
        live = self._live
        for output in processed.outputs:
            request = live.get(output.request_id)
            if request is not None:
                request.is_answered = output.finished
                output.request_id = request.user_id
                request.mailbox.put(request.index, output)
        for item in news.outputs:
            self._count(item)
        for request_id, child in processed.stopped:
            if request_id in live:
                live[request_id].stopped.add(child)
                self._client.abort_child(request_id, child)

    def _refuse(self, item: EngineCoreOutput, why: ErrorKind) -> None:
        """One answer showed that its request is wrong: the others of it end, too."""
        live = self._live.get(item.request_id)
        self.on_refusal(Refusal(item.request_id, why.kind, item.message or "", why.param, why.code))
        if live is not None and len(live.running) > 1:
            self._client.abort_requests([item.request_id])

    def on_refusal(self, refusal: Refusal) -> None:
        """The core did not take a request; its whole batch fails."""
        live = self._forget(refusal.request_id)
        if live is not None and self._front_end is not None:
            self._front_end.outputs.end(refusal.request_id, "error", refusal.message)
            live.mailbox.fail(refusal_error(refusal))

    def on_call_reply(self, reply: CallReply) -> None:
        """Whoever asked is told."""
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.kind is not None:
            future.set_exception(refusal_error(reply))
        else:
            future.set_result(reply.result)

    def on_death(self, error: HeadraceError) -> None:
        """The core is gone: every reader is told."""
        if self._death is not None:
            return
        self._death = error
        self._has_died.set()
        self.metrics.is_engine_up = False
        self.metrics.core_stats |= dict.fromkeys(_GONE_WITH_THE_CORE, 0)
        self._core_settled.set()
        for own_id, live in self._live.items():
            if self._front_end is not None:
                self._front_end.outputs.end(own_id, "error", str(error))
            live.count_ends("error")
            live.mailbox.fail(error)
        self._live.clear()
        self._core_ids.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    def _count(self, item: EngineCoreOutput) -> None:
        request = self._live.get(item.request_id)
        if request is not None:
            request.count(item)
            if not request.running:
                self._forget(item.request_id)

    async def _call(self, call: CacheCall | UpdateWeights) -> dict[str, Any]:
        """Ask the core, and wait for its answer."""
        await self.wait_ready()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = future
        self._client.call(call)
        return await future


def _text_length(prompt: Prompt | ParsedPrompt) -> int:
    if isinstance(prompt, ParsedPrompt):
        return len(prompt.text or "") if prompt.token_ids is None else 0
    return len(prompt) if isinstance(prompt, str) else 0
