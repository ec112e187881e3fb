"""Small steps over fixed buffers against plain ones. Graphs need a GPU; here a replay runs the body again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.attention.base import AttentionShape, PlanLimits
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.reference import ReferenceBackend
from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.kernels.op_plan import OpCall, OpPlan, Symbol
from headrace.kernels.reference import sampling
from headrace.runtime.cuda_graph import GraphedSteps
from headrace.runtime.plan_compiler import PlanCompiler
from headrace.runtime.worker import Worker
from tests.e2e.tiny_models import make_model

MAX_TOKENS = 16
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=6, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=8, presence_penalty=1.0, max_tokens=11, ignore_eos=True),
]


class FakeCapture:
    """Counts; what it gives runs the body again."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        index = len(self.num_replays)
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[index] += 1
            body()

        return replay


def add_small_steps(worker: Worker, max_num_seqs: int, **options: Any) -> FakeCapture:
    """What the worker does on a GPU, with the reference planner."""
    runner, model = worker._runner, worker._model
    assert runner is not None and model is not None
    shape = AttentionShape(model.num_heads, model.num_kv_heads, model.arch.head_dim)
    limits = PlanLimits(MAX_TOKENS, max_num_seqs, worker.max_model_len)
    model.reserve(64, 64)
    capture = FakeCapture()
    runner.small_steps = GraphedSteps(
        model,
        runner.states,
        worker.kv_cache_specs(),
        [ReferenceBackend(shape, torch.device("cpu"), limits) for _ in worker.kv_cache_specs()],
        max_tokens=MAX_TOKENS,
        max_requests=max_num_seqs,
        sampling=sampling,
        capture=capture,
        **({"optimize": lambda plan, num_tokens: plan} | options),
    )
    return capture


def build_core(folder: Path) -> EngineCore:
    config = EngineConfig.from_options(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=96,
        num_kv_blocks=60,
    )
    return build_engine_core(config)


def answers(core: EngineCore, params: list[SamplingParams]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in range(12):
        ids = [(7 * number + place) % 90 + 3 for place in range(1 + number * 3)]
        chosen = params[number % len(params)]
        core.add_request(EngineCoreRequest(f"r{number}", ids, chosen, chosen.max_tokens or 1))
    while core.has_work():
        for item in core.step():
            tokens, entries = found.setdefault(item.request_id, ([], []))
            tokens.extend(item.new_token_ids)
            entries.extend(item.logprobs or [])
        core.scheduler.check_integrity()
    return found


@pytest.mark.parametrize("params", [PARAMS[:1], PARAMS[:2], PARAMS], ids=["greedy", "drawn", "all"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3"])
def test_small_steps_give_the_same_answers(
    tmp_path: Path, model_type: str, params: list[SamplingParams]
) -> None:
    make_model(model_type, tmp_path)
    found = []
    for is_graphed in (False, True):
        core = build_core(tmp_path)
        capture = add_small_steps(core.executor._worker, 8) if is_graphed else None  # type: ignore[attr-defined]
        found.append(answers(core, params))
        core.shutdown()
    assert found[0].keys() == found[1].keys()
    for request_id, (tokens, entries) in found[0].items():
        other_tokens, other_entries = found[1][request_id]
        assert tokens == other_tokens
        for entry, other in zip(entries, other_entries, strict=True):
            assert entry.token_ids == other.token_ids
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)  # sums of other batch shapes
    assert capture is not None and sum(capture.num_replays) > 2


def test_each_step_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of a pipeline overwrites what it has received, so it cannot run a step again to capture it."""
    make_model("llama", tmp_path)
    core = build_core(tmp_path)
    add_small_steps(core.executor._worker, 8)  # type: ignore[attr-defined]
    counts = {"steps": 0, "bodies": 0}
    run, body = GraphedSteps.run, GraphedSteps._body

    def counted_run(self: GraphedSteps, step: Any) -> Any:
        result = run(self, step)
        counts["steps"] += result is not None
        return result

    def counted_body(self: GraphedSteps, kind: Any) -> None:
        counts["bodies"] += 1
        body(self, kind)

    monkeypatch.setattr(GraphedSteps, "run", counted_run)
    monkeypatch.setattr(GraphedSteps, "_body", counted_body)
    answers(core, PARAMS[:1])
    core.shutdown()
    assert counts["steps"] == counts["bodies"] > 10


def test_until_kernels_are_ready_recorded_ops_run(tmp_path: Path) -> None:
    """Nothing waits for a compiler: neither optimized plans nor graphs are made before."""
    make_model("llama", tmp_path)
    core = build_core(tmp_path)
    optimized: list[int] = []
    is_ready = [False]

    def optimize(plan: OpPlan, num_tokens: int) -> OpPlan:
        assert is_ready[0]
        optimized.append(num_tokens)
        return OpPlan(plan.calls, plan.buffers, plan.result)

    worker = core.executor._worker  # type: ignore[attr-defined]
    capture = add_small_steps(worker, 8, optimize=optimize, may_capture=lambda: is_ready[0])
    eager = answers(core, PARAMS)
    assert not capture.num_replays and not optimized
    is_ready[0] = True
    core.reset_prefix_cache()
    graphed = answers(core, PARAMS)
    core.shutdown()
    assert sum(capture.num_replays) > 2 and len(optimized) == len(set(optimized))
    assert [tokens for tokens, _ in eager.values()] == [tokens for tokens, _ in graphed.values()]


class CompiledOp:
    """An op that takes until it is told to compile."""

    def __init__(self, op: Any) -> None:
        self._op, self.may_end, self.num_calls = op, threading.Event(), 0

    def compile(self) -> None:
        assert self.may_end.wait(60)

    def __call__(self, *args: Any) -> None:
        assert self.may_end.is_set(), "it was run before it was compiled"
        self.num_calls += 1
        self._op(*args)


@pytest.mark.parametrize("in_background", [True, False])
def test_while_a_plan_compiles_recorded_ops_run(tmp_path: Path, in_background: bool) -> None:
    """A kernel whose form is known from the loaded weights only does not hold up steps; ranks wait for it."""
    make_model("llama", tmp_path)
    core = build_core(tmp_path)
    ops: list[CompiledOp] = []

    def optimize(plan: OpPlan, num_tokens: int) -> OpPlan:
        first, *rest = plan.calls
        ops.append(CompiledOp(first.op))
        if not in_background:
            ops[-1].may_end.set()
        return OpPlan([replace(first, op=ops[-1]), *rest], plan.buffers, plan.result)

    worker = core.executor._worker  # type: ignore[attr-defined]
    compiler = PlanCompiler(torch.device("cpu"), in_background)
    capture = add_small_steps(worker, 8, optimize=optimize, compiler=compiler)
    eager = answers(core, PARAMS)
    if in_background:
        assert ops and not capture.num_replays and not any(op.num_calls for op in ops)
        assert len(ops) == 1, "one plan at a time"
    for _ in range(8):
        for op in ops:
            op.may_end.set()
        core.reset_prefix_cache()
        again = answers(core, PARAMS)
        assert [tokens for tokens, _ in eager.values()] == [tokens for tokens, _ in again.values()]
    assert sum(capture.num_replays) > 2 and any(op.num_calls for op in ops)
    core.shutdown()


def test_weights_are_not_gone_while_a_plan_of_theirs_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for two, new ones are not read before."""
    make_model("llama", tmp_path)
    core = build_core(tmp_path)
    worker = core.executor._worker  # type: ignore[attr-defined]
    waited: list[bool] = []
    monkeypatch.setattr(worker._compiler, "wait", lambda: waited.append(worker._model is None))
    monkeypatch.setattr(worker._platform, "available_memory_bytes", lambda: 0)
    worker.update_weights(None)
    assert waited == [True] and worker._model is not None
    core.shutdown()
    assert waited == [True, True]


@pytest.mark.parametrize("is_fused", [False, True])
def test_steps_that_prepare_others_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    """Their time is not what the cost model learns from: each kind's recording and its capture, nothing else. Both
    are one step where nothing is fused, but for the very first."""
    make_model("llama", tmp_path)
    core = build_core(tmp_path)

    def optimize(plan: OpPlan, num_tokens: int) -> OpPlan:
        return OpPlan(plan.calls, plan.buffers, plan.result) if is_fused else plan

    capture = add_small_steps(core.executor._worker, 8, optimize=optimize)  # type: ignore[attr-defined]
    outputs, observed = [], []
    core.scheduler.watcher = lambda features, output: outputs.append(output.is_preparing)
    monkeypatch.setattr(core.scheduler.cost_model, "observe", lambda *step: observed.append(step))
    answers(core, PARAMS[:1])
    small_steps = core.executor._worker._runner.small_steps  # type: ignore[attr-defined]
    assert len(small_steps._seen) >= len(capture.num_replays) > 2
    if is_fused:
        assert sum(outputs) == len(small_steps._seen) + len(capture.num_replays)
    else:
        assert sum(outputs) == len(small_steps._seen) + 1, "the first kind is captured when it comes again"
    assert len(observed) == len(outputs) - sum(outputs) > 4
    core.shutdown()


def test_other_weights_have_graphs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2):
        make_model("llama", tmp_path / str(seed), seed=seed)
    plain = build_core(tmp_path / "2")
    expected = answers(plain, PARAMS[:1])
    plain.shutdown()
    core = build_core(tmp_path / "1")
    worker = core.executor._worker  # type: ignore[attr-defined]
    first = add_small_steps(worker, 8)
    before = answers(core, PARAMS[:1])
    num_before = sum(first.num_replays)
    made: list[FakeCapture] = []

    def graphed(*_: Any) -> GraphedSteps:
        made.append(add_small_steps(worker, 8))
        small_steps: GraphedSteps = worker._runner.small_steps
        return small_steps

    monkeypatch.setattr(worker._forms, "_graphed_steps", graphed)
    worker._forms.max_graph_tokens = MAX_TOKENS
    old = [weakref.ref(worker._runner.small_steps), weakref.ref(worker._model)]
    replays = worker._runner.small_steps._replays
    gc.disable()  # on a GPU their memory is wanted at once
    try:
        core.update_weights(str(tmp_path / "2"))
        replays.clear()  # a graph does not hold what it was captured from, as these do
        assert [held() for held in old] == [None, None]
    finally:
        gc.enable()
    after = answers(core, PARAMS[:1])
    core.shutdown()
    assert num_before > 2 and sum(first.num_replays) == num_before and sum(made[0].num_replays) > 2
    tokens = [{name: answer[0] for name, answer in found.items()} for found in (expected, before, after)]
    assert tokens[0] != tokens[1] and tokens[0] == tokens[2]


class TableAttention:
    """Attention of one token over a block table; it plans for itself."""

    reads_block_table_only = True

    def __init__(self, worker: Worker) -> None:
        model = worker._model
        assert model is not None
        self._attention = model.ops.attention
        shape = AttentionShape(model.num_heads, model.num_kv_heads, model.arch.head_dim)
        self._backend = ReferenceBackend(shape, torch.device("cpu"))

    def __call__(self, positions: torch.Tensor, qkv: Any, k: Any, v: Any, plan: Any, *rest: Any) -> None:
        lengths = [np.array(values, np.int32) for values in ([0, 1], [int(positions[0]) + 1])]
        metadata = AttentionMetadata(*lengths, plan.block_table, plan.block_size)
        self._attention(qkv, k, v, self._backend.plan(metadata), *rest)


def test_steps_that_read_the_block_table_only_are_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    found: list[list[int]] = []
    num_plans = [0]
    plan = GraphedSteps._plan

    def counted(self: GraphedSteps, *args: Any) -> Any:
        num_plans[0] += 1
        return plan(self, *args)

    monkeypatch.setattr(GraphedSteps, "_plan", counted)
    for is_graphed in (False, True):
        core = build_core(tmp_path)
        if is_graphed:
            worker = core.executor._worker  # type: ignore[attr-defined]
            attention = TableAttention(worker)

            def optimize(plan: OpPlan, num_tokens: int, attention: TableAttention = attention) -> OpPlan:
                positions = Symbol("positions", 1)
                calls = [
                    OpCall(
                        "table_attention",
                        attention,
                        (positions, *call.args),
                        ((0, 1), *((place + 1, index) for place, index in call.symbols)),
                    )
                    if call.name == "attention" and num_tokens == 1
                    else call
                    for call in plan.calls
                ]
                return OpPlan(calls, plan.buffers, plan.result)

            add_small_steps(worker, 8, optimize=optimize)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        core.add_request(EngineCoreRequest("r", [5, 6, 7], params, 30))
        found.append([])
        while core.has_work():
            for item in core.step():
                found[-1] += item.new_token_ids
        core.shutdown()
    assert found[0] == found[1] and len(found[0]) == 30
    assert num_plans[0] == 3, "the prompt, the first decode, and the one that was captured"


@pytest.mark.gpu
def test_graphs_give_the_eager_tokens(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    prompts = [{"prompt_token_ids": [5 + i, 6, 7][: 1 + i % 3]} for i in range(9)]
    tokens = []
    for max_graph_tokens in (0, 64):
        with LLM(
            str(tmp_path),
            dtype="float32",
            skip_tokenizer_init=True,
            max_graph_tokens=max_graph_tokens,
            max_model_len=256,
        ) as llm:
            outputs = llm.generate(prompts, [PARAMS[i % len(PARAMS)] for i in range(9)], use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert torch.cuda.is_available() and tokens[0] == tokens[1]
