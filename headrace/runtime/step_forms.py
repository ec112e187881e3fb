"""StepForms: in which forms a model's steps run on a device: recorded, as one native call, in a stage, as graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.attention.base import PlanLimits
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.kernels.op_plan import OpPlan
from headrace.kernels.registry import load_kernels
from headrace.models.causal_lm import CausalLM
from headrace.parallel.fused_reduce import FusedReduce
from headrace.parallel.world import World
from headrace.platforms.base import Platform
from headrace.runtime.attention_library import AttentionPlanners
from headrace.runtime.cuda_graph import Capture, CudaCapture, GraphedSteps, Link
from headrace.runtime.early_stage_runner import EarlyStageRunner
from headrace.runtime.memory_ledger import MemoryLedger
from headrace.runtime.model_runner import Model, ModelRunner
from headrace.runtime.native_step import NativeStep
from headrace.runtime.plan_compiler import PlanCompiler
from headrace.runtime.replayed_step import ReplayedStep
from headrace.runtime.request_states import RequestStates
from headrace.runtime.staged_model import StagedModel

if TYPE_CHECKING:
    from headrace.runtime.kernel_warmup import KernelWarmup


@dataclass(kw_only=True)
class StepForms:
    """What they are made with; one for a worker's life, whatever weights it has.

    Attributes:
        world: this rank among others.
        platform: the device; kernels: the setting; attention: the kind of kernels that computes attention.
        specs: the KV groups; planners: of their attention.
        max_step_tokens, max_seats, max_model_len: the largest step and request.
        max_logits_rows: of a step's log-probabilities of prompts.
        max_graph_tokens: the largest step that is captured; 0 for none.
        is_windowed: some layers see a window only.
        fused_reduce: sums over ranks with the norm behind them.
        compiler: of what optimized plans need; warmup: compiles what every model of these widths needs.
        memory: where graphs are booked.
    """

    world: World
    platform: Platform
    kernels: str
    attention: str
    specs: Sequence[KVCacheSpec]
    planners: AttentionPlanners
    max_step_tokens: int
    max_seats: int
    max_model_len: int
    max_logits_rows: int
    max_graph_tokens: int
    is_windowed: bool
    fused_reduce: FusedReduce | None
    compiler: PlanCompiler
    warmup: KernelWarmup | None
    memory: MemoryLedger

    def install(self, model: CausalLM, runner: ModelRunner) -> None:
        """Have the runner compute with a model from now on, recorded or captured anew."""
        model.bind_kv_cache(runner.kv_cache)
        stepped: Model = model
        native: NativeStep | None = None
        if self.attention == "native":
            stepped = native = NativeStep(model)
        elif self.platform.device.type == "cpu":
            stepped = ReplayedStep(model)
        link: Link | None = self.world.link
        if self.world.link is not None:
            stepped = StagedModel(stepped, model, self.world.link)
        if isinstance(runner, EarlyStageRunner) and link is not None:
            link = runner.link_to(link)
        small = self._graphed_steps(model, runner.states, link) if self.max_graph_tokens else None
        runner.use(stepped, small, None if native is None else native.best_tokens)

    def _graphed_steps(self, model: CausalLM, states: RequestStates, link: Link | None) -> GraphedSteps:
        """Small steps as CUDA graphs, over buffers that will not move again."""
        limits = PlanLimits(self.max_graph_tokens, self.max_seats, self.max_model_len)
        model.reserve(
            max(self.max_step_tokens, limits.max_tokens),
            max(self.max_seats, self.max_logits_rows),
        )
        return GraphedSteps(
            model,
            states,
            self.specs,
            [self.planners.make(limits) for _ in self.specs],
            max_tokens=limits.max_tokens,
            max_requests=self.max_seats,
            sampling=load_kernels("sampling", self.platform.device, self.kernels),
            optimize=self._fuse,
            capture=self._booked(CudaCapture()),
            may_capture=self._may_capture,
            compiler=self.compiler,
            picks=self.world.stage.is_last,
            link=link,
        )

    def _booked(self, capture: Capture) -> Capture:
        """Captures, and books what graphs hold."""

        def captured(body: Callable[[], None]) -> Callable[[], None]:
            with self.memory.spending_of_device("graphs"):
                return capture(body)

        return captured

    def _may_capture(self) -> bool:
        """Whether kernels are compiled and no other thread launches. Ranks capture in the same step: they wait."""
        if self.warmup is not None and self.world.size > 1:
            self.warmup.wait()
        return (self.warmup is None or self.warmup.is_done) and self.planners.may_capture()

    def _fuse(self, plan: OpPlan, num_tokens: int) -> OpPlan:
        """Neighbouring ops of a recorded forward in one launch where the device's kernels can."""
        device, exchange = self.platform.device, None
        if self.fused_reduce is not None and num_tokens <= self.fused_reduce.max_rows:
            exchange = self.fused_reduce.exchange
            plan = load_kernels("reduce_fusion", device).fuse_reductions(plan, self.fused_reduce.op)
        fusion = load_kernels("fusion", device)
        fused: OpPlan = fusion.fuse(plan, num_tokens, is_windowed=self.is_windowed, exchange=exchange)
        return fused
