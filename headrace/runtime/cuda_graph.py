"""GraphedSteps: small steps as CUDA graphs, from their inputs to their tokens, captured between steps as sizes turn up.

A graph is captured for a number of tokens (a bucket); a step with fewer is padded: padding tokens are stored nowhere
(slot -1) and no plan reads them. Inputs lie at fixed addresses and plans come from backends with ``PlanLimits``, so a
step costs two copies and one launch. In a step of decodes the head and the pick of tokens belong to the graph too
(whole rows of logits that lie on several ranks are gathered after it, where a request asks for them).
Nothing is captured before the first token: a size runs eagerly the first time, when its ops are recorded, and its
graph is captured behind that run if nothing is fused in it, else when it comes again, one at a time, once the kernels
of optimized plans are ready. Until then the recorded ops run: nothing waits for a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from headrace.attention.base import AttentionBackend
from headrace.attention.metadata import AttentionPlan, ForwardBatch, GroupBatch
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.errors import CapacityError
from headrace.kernels.arena import Arena
from headrace.kernels.op_plan import OpPlan, record
from headrace.kernels.registry import Ops
from headrace.layers.sliced_logits import SlicedLogits
from headrace.runtime.graph_inputs import GraphInputs, InputViews
from headrace.runtime.plan_compiler import PlanCompiler
from headrace.runtime.request_states import RequestStates
from headrace.runtime.sampler import PackedTokens
from headrace.runtime.step_layout import StepLayout
from headrace.runtime.step_result import StepResult
from headrace.runtime.token_picker import TokenPicker

BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 352, 384, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
)  # fmt: skip
"""Numbers of tokens that graphs are captured for, up to the limit given. Between 256 and 512 only those for which the
library picks a fast product of wide matrices: 448 rows take it 281 us where 512 take 159 (benchmarks/NOTES.md)."""


class EagerModel(Protocol):
    """A model that calls registered ops only, over buffers of ``arena``."""

    ops: Ops
    arena: Arena

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]."""

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """Logits of R rows."""

    def stage_buffers(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """What passes between stages of a pipeline."""


class Link(Protocol):
    """To the neighbouring stages (``parallel.pipeline.PipelineLink``); activations cross outside of graphs."""

    def receive(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Fill the tensors with what the stage before sends."""

    def send(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Send them to the stage after."""


class StepKind(NamedTuple):
    """Steps that share a graph.

    bucket: tokens, padded.
    has_long_tiles: some attention tile has more rows than a decode's.
    is_decode: all requests have one token and sample, so the graph picks tokens.
    is_random: some of them draw.
    """

    bucket: int
    has_long_tiles: bool
    is_decode: bool
    is_random: bool


class _Outputs(NamedTuple):
    """Where a graph leaves its results, padded."""

    hidden: torch.Tensor
    logits: SlicedLogits | None = None
    tokens: PackedTokens | None = None


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Given what to run, gives what runs it again."""


class GraphedSteps:
    """Runs the steps that are small enough; bitwise the same results as the padded eager forward, but for
    attention of decodes, whose launch, and so its rounding, is what suited the step that was captured.

    Args:
        model: the eager model, bound to its KV cache, whose buffers are reserved for the largest step.
        states: the requests' persistent state.
        specs: the model's KV groups; backends: a planner with ``PlanLimits`` for each.
        max_tokens: the largest step that is captured, the limit of the backends' plans.
        max_requests: the most requests of a step.
        sampling: a ``sampling`` module of ``headrace.kernels``.
        optimize: (a recorded forward, its number of tokens) -> a plan of fewer ops that gives the same.
        capture: makes a graph.
        may_capture: whether now: the kernels of optimized plans are compiled and no other thread launches. Until then
            kinds run op by op, as recorded.
        compiler: of what optimized plans need; without one it is compiled in the step that runs them first.
        picks: the model has a head, so that graphs of decodes pick tokens.
        link: to the neighbours of a pipeline's stage.
    """

    def __init__(
        self,
        model: EagerModel,
        states: RequestStates,
        specs: Sequence[KVCacheSpec],
        backends: Sequence[AttentionBackend],
        *,
        max_tokens: int,
        max_requests: int,
        sampling: Any,
        optimize: Callable[[OpPlan, int], OpPlan],
        capture: Capture,
        may_capture: Callable[[], bool] = lambda: True,
        compiler: PlanCompiler | None = None,
        picks: bool = True,
        link: Link | None = None,
    ) -> None:
        self._model = model
        self._states = states
        self._specs = specs
        self._backends = backends
        self._picker = TokenPicker(sampling)
        self._optimize = optimize
        self._capture = capture
        self._may_capture = may_capture
        self._picks = picks
        self._link = link
        self._buckets = [size for size in BUCKETS if size <= max_tokens]
        self._max_requests = max_requests
        device = states.tokens.tensor.device
        self._compiler = compiler or PlanCompiler(device, in_background=False)
        self._inputs = GraphInputs(states, len(specs), self._buckets[-1], max_requests, device)
        self._rows = torch.arange(min(self._buckets[-1], max_requests), device=device)
        self._batch: ForwardBatch
        self._recorded: dict[tuple[int, bool], OpPlan] = {}
        self._optimized: dict[tuple[int, bool], OpPlan] = {}
        self._plans: dict[tuple[int, bool], OpPlan] = {}
        self._replays: dict[StepKind, Callable[[], None]] = {}
        self._outputs: dict[StepKind, _Outputs] = {}
        self._seen: set[StepKind] = set()
        self._need_no_plan: set[StepKind] = set()  # captured, and whatever the attention's work, right for it

    def run(self, step: StepLayout) -> StepResult | None:
        """Run a step; by a graph when its kind has been captured. None: it is too large, run it otherwise."""
        bucket = next((size for size in self._buckets if size >= step.num_tokens), None)
        if bucket is None:
            return None
        is_decode = step.is_decode and self._picks and bucket <= len(self._rows)
        is_plain, draw = False, None
        if is_decode:
            is_plain, draw = self._states.sampling.plain_draw(step.sampled_slots, step.sampled_positions)
        kind = StepKind(bucket, False, is_decode, draw is not None)
        if kind not in self._need_no_plan:
            views = self._inputs.views(bucket)
            plans = self._plan(step, views)
            if plans is None:
                return None
            kind = kind._replace(has_long_tiles=any(map(_has_long_tiles, plans)))
            self._batch = ForwardBatch(
                bucket, views.ids, views.positions, tuple(map(GroupBatch, views.slot_mappings, plans))
            )
        self._inputs.fill(step, bucket, draw)
        if self._link is not None:
            self._link.receive(self._model.stage_buffers(step.num_tokens))
        num_prepared = len(self._seen) + len(self._replays)
        outputs = self._run(kind)
        is_preparing = len(self._seen) + len(self._replays) > num_prepared
        if self._link is not None:
            self._link.send(self._model.stage_buffers(step.num_tokens))
        return self._result(step, kind, outputs, is_picked=is_plain, is_preparing=is_preparing)

    def _plan(self, step: StepLayout, views: InputViews) -> list[AttentionPlan] | None:
        """Every KV group's plan, or None: few tokens, but contexts so long that fixed buffers do not hold their
        splits."""
        size = self._states.block_size
        try:
            return [
                backend.plan(step.attention(spec, table, size))
                for spec, backend, table in zip(self._specs, self._backends, views.tables, strict=True)
            ]
        except CapacityError:
            return None

    def _run(self, kind: StepKind) -> _Outputs:
        """Run the step's work once: what a stage of a pipeline has received is overwritten by it."""
        if kind in self._replays:
            self._replays[kind]()
            return self._outputs[kind]
        may_capture = bool(self._seen) and self._may_capture() and self._compiler.is_idle
        if may_capture and kind in self._seen:
            self._optimize_plan(kind)
        is_optimized = (kind.bucket, kind.has_long_tiles) in self._plans
        self._body(kind)  # also loads the kernels of an optimized plan, which is not done under capture
        outputs = self._outputs[kind]
        if may_capture and (self._optimize_plan(kind) or (is_optimized and kind in self._seen)):
            self._replays[kind] = self._capture(lambda: self._body(kind))
            if not self._plans[kind.bucket, kind.has_long_tiles].reads_attention_work:
                self._need_no_plan.add(kind)
        self._seen.add(kind)
        return outputs

    def _optimize_plan(self, kind: StepKind) -> bool:
        """From here on, or once their kernels are compiled, the steps of this size run fewer ops. Whether they ran as
        few already."""
        key = (kind.bucket, kind.has_long_tiles)
        if key not in self._plans:
            if key not in self._optimized:
                self._optimized[key] = self._optimize(self._recorded[key], kind.bucket)
            if not self._compiler.is_ready(self._optimized[key]):
                return False
            self._plans[key] = self._optimized[key]
        return self._plans[key] is self._recorded[key]

    def _body(self, kind: StepKind) -> None:
        """What a graph does, from ids to tokens."""
        self._inputs.gather(kind.bucket)
        self._outputs[kind] = self._pick(kind, self._forward(kind))

    def _forward(self, kind: StepKind) -> torch.Tensor:
        key = (kind.bucket, kind.has_long_tiles)
        plan = self._plans.get(key, self._recorded.get(key))
        if plan is not None:
            return plan.replay(self._batch)
        self._recorded[key] = recorded = record(self._model, self._batch)
        return recorded.result.rows(kind.bucket)

    def _pick(self, kind: StepKind, hidden: torch.Tensor) -> _Outputs:
        """The tokens of a step of decodes, put where the next step reads them."""
        if not kind.is_decode:
            return _Outputs(hidden)
        views = self._inputs.views(kind.bucket)
        logits = self._model.compute_logits(hidden, self._rows[: kind.bucket])
        best_logits, tokens = self._picker.best(logits)
        if kind.is_random:
            drawn = self._picker.draw(logits, best_logits, views.temperature, views.key)
            tokens = torch.where(views.is_random > 0, drawn, tokens)
        tokens = tokens.int()
        self._states.tokens.tensor.view(-1).index_copy_(0, views.sampled_places, tokens)
        return _Outputs(hidden, logits, PackedTokens.pack(tokens, best_logits))

    def _result(
        self, step: StepLayout, kind: StepKind, outputs: _Outputs, *, is_picked: bool, is_preparing: bool
    ) -> StepResult:
        views, count = self._inputs.views(kind.bucket), len(step.sampled_ids)
        places = views.sampled_places[:count]
        if not kind.is_decode:
            return StepResult(outputs.hidden, views.sampled_rows[:count], places, is_preparing=is_preparing)
        assert outputs.logits is not None and outputs.tokens is not None
        picked = outputs.tokens.first(count) if is_picked else None
        return StepResult(
            outputs.hidden, self._rows[:count], places, outputs.logits.first(count), picked, is_preparing
        )


class CudaCapture:
    """Captures CUDA graphs that share one memory pool, since they run one after another."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream = _capture_stream(torch.cuda.current_device())

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture what ``body`` launches; nothing runs until the graph is replayed."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._pool = self._pool or graph.pool()
        return graph.replay


@functools.cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """One for all captures of a process: cuBLAS keeps a workspace of 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream(device_index)


def _has_long_tiles(plan: AttentionPlan) -> bool:
    work = plan.derived.get("triton")
    return bool(work is not None and work.num_long)
