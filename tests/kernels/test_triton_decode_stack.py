"""All layers of one token in one launch against the ops of the same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import headrace.kernels.triton.stack_layers as stack_layers_module
from headrace.kernels.affine_matrix import AffineMatrix, GroupScales
from headrace.kernels.arena import Arena
from headrace.kernels.op_plan import OpCall, OpPlan, record
from headrace.kernels.quantized_cache import KV_FORMATS
from headrace.kernels.registry import Ops
from headrace.kernels.triton import decode_stack
from headrace.kernels.triton.decode_stack import DecodeStack, LayerTensors, divide
from headrace.kernels.triton.fusion import fuse
from headrace.kernels.triton.rank_exchange import RankExchange, Ranks
from headrace.kernels.triton.stack_layers import stack_layers
from headrace.kernels.triton.word_matrix import WordMatrix
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from tests.kernels.triton_setup import DEVICE, HALF, relative_error

EPS, BLOCK = 1e-5, 16


@dataclass(frozen=True)
class Shape:
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 2
    has_qk_norm: bool = False
    has_bias: bool = False
    kind: str = "silu"
    soft_cap: float | None = None
    packed: tuple[int, bool] | None = None
    """4-bit weights: (columns of a group, whether it has minimums)."""


LARGE = Shape(4096, 14336, 32, 8, 128, 3)
SMALL = Shape(1024, 3072, 16, 8, 128, 4, has_qk_norm=True)


class Model:
    """Decoder layers over random weights and caches, with the contexts that a test asks for."""

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        self.ops = Ops.for_device(DEVICE, "auto" if DEVICE.type == "cuda" else "reference")
        self.arena = Arena(DEVICE)
        self.shape = shape
        generator = torch.Generator(DEVICE).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator, device=DEVICE) * columns**-0.5).to(HALF)

        def matrix(rows: int, columns: int) -> Any:
            if shape.packed is None:
                return weight(rows, columns)
            group, has_minimums = shape.packed
            sizes = (rows, -(-columns // group))
            codes = torch.randint(
                0, 16, (rows, columns), generator=generator, device=DEVICE, dtype=torch.uint8
            )
            scales = (torch.rand(sizes, generator=generator, device=DEVICE) + 0.5) * columns**-0.5 / 4
            minimums = GroupScales(-7.5 * scales.half()) if has_minimums else None
            return self.ops.pack_matrix(AffineMatrix(codes, 4, group, GroupScales(scales.half()), minimums))

        def norm(width: int) -> torch.Tensor:
            return torch.rand(width, generator=generator, device=DEVICE) + 0.5

        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.table = matrix(7, shape.hidden)
        self.layers = [
            SimpleNamespace(
                qkv=matrix(width, shape.hidden),
                bias=weight(1, width)[0].clone() if shape.has_bias else None,
                output=matrix(shape.hidden, shape.heads * shape.head_dim),
                gate_up=matrix(2 * shape.inner, shape.hidden),
                down=matrix(shape.hidden, shape.inner),
                norms=[norm(shape.hidden), norm(shape.hidden)],
                q_norm=norm(shape.head_dim) if shape.has_qk_norm else None,
                k_norm=norm(shape.head_dim) if shape.has_qk_norm else None,
            )
            for _ in range(shape.layers)
        ]
        self.last_norm = norm(shape.hidden)
        sizes = (num_blocks, shape.layers, 2, shape.kv_heads, BLOCK, shape.head_dim)
        self.cache = torch.randn(sizes, generator=generator, device=DEVICE).to(HALF)
        self.caches = [(self.cache[:, index, 0], self.cache[:, index, 1]) for index in range(shape.layers)]
        angles = torch.rand(num_blocks * BLOCK, shape.head_dim // 2, generator=generator, device=DEVICE) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        names = {
            "hidden": shape.hidden,
            "residual": shape.hidden,
            "qkv": width,
            "attended": shape.heads * shape.head_dim,
            "gate_up": 2 * shape.inner,
            "act": shape.inner,
        }
        self._buffers = [self.arena.buffer(name, size, HALF) for name, size in names.items()]

    def forward(self, batch: Any) -> torch.Tensor:
        ops, shape = self.ops, self.shape
        hidden, residual, qkv, attended, gate_up, act = (buffer.rows(1) for buffer in self._buffers)
        heads, group = (shape.heads, shape.kv_heads, shape.head_dim), batch.groups[0]
        embedding = ops.embedding if shape.packed is None else ops.embedding_packed
        embedding(batch.input_ids, self.table, residual, shape.hidden**0.5)
        for index, layer in enumerate(self.layers):
            if index == 0:
                ops.rms_norm(residual, layer.norms[0], EPS, hidden)
            else:
                ops.add_rms_norm(hidden, residual, layer.norms[0], EPS, hidden)
            caches = self.caches[index]
            linear = ops.linear if shape.packed is None else ops.linear_packed
            linear(hidden, layer.qkv, layer.bias, qkv)
            ops.rope_and_store(
                qkv,
                layer.q_norm,
                layer.k_norm,
                EPS,
                self.cos_sin,
                batch.positions,
                group.slot_mapping,
                *caches,
                *heads,
            )
            ops.attention(qkv, *caches, group.plan, attended, *heads, 0.2, shape.soft_cap)
            linear(attended, layer.output, None, hidden)
            ops.add_rms_norm(hidden, residual, layer.norms[1], EPS, hidden)
            linear(hidden, layer.gate_up, None, gate_up)
            ops.gated_act(gate_up, shape.kind, act)
            linear(act, layer.down, None, hidden)
        ops.add_rms_norm(hidden, residual, self.last_norm, EPS, hidden)
        return hidden


def make_batch(context: int, num_blocks: int) -> Any:
    """One token at the end of a context, its blocks in falling order."""
    import numpy as np

    from headrace.attention.base import AttentionShape
    from headrace.attention.metadata import AttentionMetadata

    if DEVICE.type == "cuda":
        from headrace.attention.triton import TritonBackend as Backend
    else:
        from headrace.attention.reference import ReferenceBackend as Backend
    table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32, device=DEVICE)[None, :]
    lengths = np.array([context], np.int32)
    metadata = AttentionMetadata(np.array([0, 1], np.int32), lengths, table, BLOCK)
    plan = Backend(AttentionShape(4, 2, 32), DEVICE).plan(metadata)
    last = context - 1
    slot = (num_blocks - 1 - last // BLOCK) * BLOCK + last % BLOCK

    def number(value: int) -> torch.Tensor:
        return torch.tensor([value], device=DEVICE)

    return SimpleNamespace(
        num_tokens=1,
        input_ids=number(3),
        positions=number(last),
        groups=(SimpleNamespace(slot_mapping=number(slot), plan=plan),),
    )


def check(shape: Shape, contexts: list[int], tolerance: float) -> None:
    num_blocks = -(-max(contexts) // BLOCK)
    model = Model(shape, num_blocks)
    cache = model.cache.clone()
    plan = record(model, make_batch(contexts[0], num_blocks))
    stacked = stack_layers(plan)
    assert stacked is not None and [call.name for call in stacked.calls] == [
        "embedding" if shape.packed is None else "embedding_packed",
        "decode_stack",
        "add_rms_norm",
    ]
    for context in contexts:
        batch = make_batch(context, num_blocks)
        results = []
        for way in (plan, stacked):
            model.cache.copy_(cache)
            for buffer in way.buffers[2:]:
                buffer.rows(1).fill_(torch.nan)
            results.append((way.replay(batch).clone(), model.cache.clone()))
        errors = [relative_error(results[1][i], results[0][i]) for i in (0, 1)]
        assert max(errors) < tolerance, (context, errors)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(has_qk_norm=True, kind="gelu_tanh", layers=1),
        Shape(hidden=40, inner=72, heads=3, kv_heads=1, has_bias=True),
    ],
)
def test_the_same_as_the_ops(shape: Shape) -> None:
    check(shape, [33, 1], 4e-3 if DEVICE.type == "cpu" else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LARGE, SMALL, replace(SMALL, has_qk_norm=False, has_bias=True)])
def test_real_widths(shape: Shape) -> None:
    check(shape, [1, 64, 65, 1000, 5000], 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [(32, False), (32, True), (128, False), (4096, True)])
@pytest.mark.parametrize("shape", [LARGE, SMALL])
def test_packed_weights(shape: Shape, packed: tuple[int, bool]) -> None:
    check(replace(shape, packed=packed), [1, 65, 1000], 2e-2)


def packed_plan(model: Model) -> OpPlan:
    """A recorded forward as on a GPU, also where the reference's ops were recorded."""

    def as_words(value: Any) -> Any:
        return WordMatrix.pack(value) if isinstance(value, AffineMatrix) else value

    plan = record(model, make_batch(5, 2))
    calls = [replace(call, args=tuple(map(as_words, call.args))) for call in plan.calls]
    return OpPlan(calls, plan.buffers, plan.result)


@pytest.mark.parametrize("fits", [True, False])
def test_packed_weights_that_no_ring_fits_stay_ops(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    monkeypatch.setattr(stack_layers_module, "ring_tiles", lambda *args: object() if fits else None)
    monkeypatch.setattr(stack_layers_module, "DecodeStack", lambda *args: print)
    assert (stack_layers(packed_plan(Model(Shape(packed=(32, True)), 2))) is not None) == fits


def names_after(change: Any) -> list[str] | None:
    model = Model(Shape(), 2)
    change(model)
    stacked = stack_layers(record(model, make_batch(5, 2)))
    return None if stacked is None else [call.name for call in stacked.calls]


def test_layers_that_differ_are_left_alone() -> None:
    def change(model: Model) -> None:
        model.layers[1].q_norm = model.layers[1].k_norm = torch.ones(32, device=DEVICE)

    assert names_after(change) is None
    assert names_after(lambda model: setattr(model, "shape", replace(model.shape, soft_cap=30.0))) is None


def test_layers_with_a_window_are_no_stack() -> None:
    """A stack reads every block from the first on; of a window's, the old ones belong to others by then."""
    plan = record(Model(Shape(), 2), make_batch(5, 2))
    assert [call.name for call in fuse(plan, 1).calls] == ["embedding", "decode_stack", "add_rms_norm"]
    assert "decode_stack" not in [call.name for call in fuse(plan, 1, is_windowed=True).calls]


def test_other_plans_are_left_alone() -> None:
    plan = record(Model(Shape(), 2), make_batch(5, 2))
    assert stack_layers(OpPlan(plan.calls[:-1], plan.buffers, plan.result)) is None
    assert stack_layers(OpPlan(plan.calls[:3] + plan.calls[4:], plan.buffers, plan.result)) is None


@pytest.mark.parametrize(
    ("n", "k", "matrices"), [(6144, 4096, 1), (1024, 2048, 1), (14336, 4096, 2), (576, 1536, 1)]
)
def test_shares_cover_the_matrix_and_fill_the_device(n: int, k: int, matrices: int) -> None:
    share = divide(n, k, 132, matrices)
    assert share.num_tiles * share.block_n >= n and -(-k // share.block_k) * share.block_k >= k


@pytest.mark.parametrize(
    ("arch", "shared_bytes", "has_ring"), [(75, 64 << 10, False), (86, 99 << 10, True), (90, 227 << 10, True)]
)
def test_which_gpus_stream_weights(
    monkeypatch: pytest.MonkeyPatch, arch: int, shared_bytes: int, has_ring: bool
) -> None:
    """Those that can copy in the background; how far ahead, their shared memory says."""
    monkeypatch.setattr(decode_stack, "INTERPRETED", False)
    monkeypatch.setattr(decode_stack, "architecture", lambda: arch)
    monkeypatch.setattr(decode_stack, "max_shared_bytes", lambda device: shared_bytes)
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    matrices = (empty(4096, 1024), empty(1024, 2048), empty(6144, 1024), empty(1024, 3072))
    names = ("qkv", "output", "gate_up", "down")
    layer = SimpleNamespace(matrices=matrices, **dict(zip(names, matrices, strict=True)))
    tiles = decode_stack.ring_tiles(layer, 132)  # type: ignore[arg-type]
    assert (tiles is not None) == has_ring
    if tiles is not None:
        num_bytes = 2 * (tiles.num_slots * tiles.num_rows * tiles.block_k + 4096)
        assert 0.5 * shared_bytes < num_bytes <= shared_bytes


def test_a_quantized_cache_is_no_stack() -> None:
    """Its codes and scales are no tensor; one token over it runs op by op."""
    shape = Shape()
    model, forms = Model(shape, 4), KV_FORMATS["int8"]
    specs = kv_cache_specs_for([None] * shape.layers, shape.kv_heads, shape.head_dim, BLOCK, forms)
    layout = KVCacheLayout(shape.layers, shape.kv_heads, BLOCK, shape.head_dim, forms)
    cache = KVCache(specs, layout, 4, DEVICE)
    cache.blocks.zero_()
    model.caches = [cache.layer_views(index) for index in range(shape.layers)]
    plan = record(model, make_batch(20, 4))
    assert stack_layers(plan) is None
    assert fuse(plan, 1).calls


class TwoRanks:
    """Both ranks of a tensor-parallel group on one GPU, each with a part of its multiprocessors and of every layer."""

    def __init__(self, model: Model, shape: Shape, num_programs: int = 64) -> None:
        parts = [torch.zeros(2, 2, shape.hidden, dtype=HALF, device=DEVICE) for _ in range(2)]
        arrivals = [torch.zeros(32, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        addresses = [
            torch.tensor([each.data_ptr() for each in kind], device=DEVICE) for kind in (parts, arrivals)
        ]
        self._memory = parts, arrivals
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        heads = (shape.heads // 2, shape.kv_heads // 2, shape.head_dim)
        self.stacks = []
        for rank in range(2):
            exchange = RankExchange(Ranks(2, rank), *addresses, num_programs)
            layers = [self._part(model, shape, index, rank) for index in range(shape.layers)]
            self.stacks.append(DecodeStack(layers, EPS, 0.2, heads, shape.kind, exchange))

    @staticmethod
    def _part(model: Model, shape: Shape, index: int, rank: int) -> LayerTensors:
        layer, size, kv = model.layers[index], shape.head_dim, shape.kv_heads // 2
        qkv = layer.qkv.split([shape.heads * size, shape.kv_heads * size, shape.kv_heads * size])
        caches = [cache[:, rank * kv : (rank + 1) * kv] for cache in model.caches[index]]

        def half(matrix: torch.Tensor, dim: int) -> torch.Tensor:
            return matrix.chunk(2, dim)[rank]

        return LayerTensors(
            torch.cat([half(part, 0) for part in qkv]),
            None,
            half(layer.output, 1).contiguous(),
            torch.cat([half(part, 0) for part in layer.gate_up.chunk(2)]),
            half(layer.down, 1).contiguous(),
            *layer.norms,
            layer.q_norm,
            layer.k_norm,
            *caches,
            (),
            model.cos_sin,
        )

    def __call__(self, embedding: torch.Tensor, batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(residual, hidden) of either rank."""
        group, results = batch.groups[0], []
        torch.cuda.synchronize()
        for stack, stream in zip(self.stacks, self._streams, strict=True):
            residual, hidden = embedding.clone(), torch.full_like(embedding, torch.nan)
            torch.cuda.current_stream().synchronize()
            with torch.cuda.stream(stream):
                stack(residual, hidden, group.plan, batch.positions, group.slot_mapping)
            results.append((residual, hidden))
        torch.cuda.synchronize()
        return results


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [replace(LARGE, heads=16, kv_heads=4), SMALL])
def test_two_ranks_add_up(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one rank, the same bits on both, launch after launch."""
    options = {"num_warps": 8}  # a cooperative launch would not share the GPU with another
    monkeypatch.setattr(DecodeStack, "_options", options)
    model = Model(shape, 64)
    plan = record(model, make_batch(5, 64))
    cache = model.cache.clone()
    ranks = TwoRanks(model, shape)
    for stack in ranks.stacks:
        stack.compile()
    for context in (1, 64, 65, 1000, 1001):
        batch = make_batch(context, 64)
        model.cache.copy_(cache)
        expected, filled = plan.replay(batch).clone(), model.cache.clone()
        model.cache.copy_(cache)
        embedding = model.table[batch.input_ids] * shape.hidden**0.5
        (residual, hidden), others = ranks(embedding, batch)
        assert torch.equal(residual, others[0]) and torch.equal(hidden, others[1])
        model.ops.add_rms_norm(hidden, residual, model.last_norm, EPS, hidden)
        assert relative_error(hidden, expected) < 2e-2
        assert relative_error(model.cache, filled) < 2e-2


def test_a_ranks_layers_are_found_and_added_up() -> None:
    """Of a plan whose sums over ranks are fused; where no kernel knows of ranks it stays as it is."""
    plan = record(Model(Shape(), 2), make_batch(5, 2))
    embedding, *layers = plan.calls
    residual = embedding.args[2]
    sum_of_ranks = OpCall("all_reduce", print, (residual,), ((0, residual.index),))
    fused = [
        OpCall("all_reduce_add_norm", print, call.args, call.symbols) if call.name == "add_rms_norm" else call
        for call in layers
    ]
    rank_plan = OpPlan([embedding, sum_of_ranks, *fused], plan.buffers, plan.result)
    assert stack_layers(rank_plan) is None
    number = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    exchange = RankExchange(Ranks(2, 0), number, number, 1)
    assert stack_layers(rank_plan, exchange) is None, "tiles of the ring do not suit such small layers"
    assert stack_layers(plan, exchange) is None


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("is_found_elsewhere", [True, False])
def test_ranks_have_a_stack_together_or_none(
    monkeypatch: pytest.MonkeyPatch, is_found: bool, is_found_elsewhere: bool
) -> None:
    """One that ran ops would wait in a sum for another that adds up in its launch. All ask, whatever they found."""
    plan = record(Model(Shape(), 2), make_batch(5, 2))
    asked: list[bool] = []
    monkeypatch.setattr(stack_layers_module, "_stacked", lambda plan, exchange: plan if is_found else None)

    def all_agree(verdict: bool) -> bool:
        asked.append(verdict)
        return verdict and is_found_elsewhere

    number = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    found = stack_layers(plan, RankExchange(Ranks(2, 0), number, number, 1, all_agree))
    assert found is (plan if is_found and is_found_elsewhere else None)
    assert asked == [is_found]


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16])
def test_a_cache_of_another_type_than_activations_is_no_stacks(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype
) -> None:
    """The kernel would take their bits for numbers of the cache's type; packed weights have none of their own."""
    monkeypatch.setattr(stack_layers_module, "ring_tiles", lambda layer, num_programs: object())
    monkeypatch.setattr(stack_layers_module, "DecodeStack", lambda *args: print)
    model = Model(Shape(packed=(32, True)), 2)
    cache = model.cache.to(kv_dtype)
    model.caches = [(cache[:, index, 0], cache[:, index, 1]) for index in range(len(model.layers))]
    assert (stack_layers(packed_plan(model)) is not None) == (kv_dtype == HALF)
