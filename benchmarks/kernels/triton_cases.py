"""The cases of bench_triton: every kernel at the shapes of Llama-3-8B and Qwen3-0.6B, with variants to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from triton_timing import Case, Launch, Work

import headrace.kernels.triton.attention as attention_op
from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.triton import TritonBackend
from headrace.attention.triton_work_list import SplitRule
from headrace.kernels.reference.noise import exponentials
from headrace.kernels.triton import sampling
from headrace.kernels.triton.activation import gated_act
from headrace.kernels.triton.attention_tiles import LaunchShape
from headrace.kernels.triton.embedding import embedding
from headrace.kernels.triton.linear import GemvShape, cublas, gemv, linear
from headrace.kernels.triton.norm import add_rms_norm
from headrace.kernels.triton.rope_and_store import rope_and_store

BF16 = torch.bfloat16
COLD_BYTES = 240 << 20


@dataclass(frozen=True)
class Model:
    """Shapes of one model."""

    name: str
    layers: int
    hidden: int
    inner: int
    shape: AttentionShape
    vocab: int
    has_qk_norm: bool

    @property
    def qkv(self) -> int:
        """Outputs of the query, key and value projections."""
        return (self.shape.num_heads + 2 * self.shape.num_kv_heads) * self.shape.head_dim

    @property
    def attended(self) -> int:
        """Width of attention's output."""
        return self.shape.num_heads * self.shape.head_dim

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """{name: (outputs, inputs, how often in a step)}."""
        return {
            "qkv": (self.qkv, self.hidden, self.layers),
            "out": (self.hidden, self.attended, self.layers),
            "gate_up": (2 * self.inner, self.hidden, self.layers),
            "down": (self.hidden, self.inner, self.layers),
            "head": (self.vocab, self.hidden, 1),
        }


LLAMA = Model("llama-3-8b", 32, 4096, 14336, AttentionShape(32, 8, 128), 128256, False)
QWEN = Model("qwen3-0.6b", 28, 1024, 3072, AttentionShape(16, 8, 128), 151936, True)


def randn(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def error_of(out: torch.Tensor, exact: torch.Tensor) -> float:
    """||out - exact|| / ||exact||"""
    return float((out.double() - exact).norm() / exact.norm())


# --- linear ---------------------------------------------------------------------------------------------------------

GEMV_SHAPES = [
    GemvShape(4, 1024, 4),
    GemvShape(8, 1024, 4),
    GemvShape(4, 2048, 4),
    GemvShape(2, 2048, 4),
    GemvShape(16, 512, 4),
]


def linear_cases() -> Iterator[Case]:
    for model in (LLAMA, QWEN):
        for name, (outputs, inputs, count) in model.linears().items():
            out_type = torch.float32 if name == "head" else BF16
            for rows in (1, 8, 16, 32, 64, 256):
                ways: dict[str, Callable[..., None]] = {"cublas": cublas}
                if rows == 1:
                    ways |= {_text(shape): partial(gemv, shape=shape) for shape in GEMV_SHAPES}
                for variant, way in ways.items():
                    yield Case(
                        group="linear",
                        name=f"{model.name} {name} T={rows}",
                        variant=variant,
                        make=partial(_linear_work, way, rows, outputs, inputs, out_type),
                        bytes=2 * outputs * inputs + 2 * rows * inputs + out_type.itemsize * rows * outputs,
                        flops=2 * rows * outputs * inputs,
                        extra={"count": count, "model": model.name, "rows": rows, "default": linear},
                    )


def _text(shape: GemvShape) -> str:
    return f"gemv({shape.block_n},{shape.block_k},{shape.num_warps})"


def _linear_work(
    way: Callable[..., None],
    rows: int,
    outputs: int,
    inputs: int,
    out_type: torch.dtype,
    device: torch.device,
) -> Work:
    copies = 1 if device.type == "meta" else max(1, -(-COLD_BYTES // (2 * outputs * inputs)))
    x = randn(device, rows, inputs)
    weights = [randn(device, outputs, inputs) for _ in range(copies)]
    out = torch.full((rows, outputs), torch.nan, dtype=out_type, device=device)

    def check() -> float:
        part = slice(0, min(outputs, 8192))
        return error_of(out[:, part], x.double() @ weights[-1][part].double().T)

    return Work([partial(way, x, weight, None, out) for weight in weights], check)


# --- attention ------------------------------------------------------------------------------------------------------

SHORT_SHAPES = [
    LaunchShape(16, 64, 3, 4, 3),
    LaunchShape(16, 64, 2, 4, 4),
    LaunchShape(16, 32, 4, 4, 4),
    LaunchShape(16, 128, 2, 4, 2),
]
LONG_SHAPES = [
    LaunchShape(128, 128, 2, 8, 1),
    LaunchShape(128, 64, 3, 8, 1),
    LaunchShape(128, 64, 2, 8, 1),
    LaunchShape(64, 64, 3, 4, 2),
    LaunchShape(64, 128, 2, 4, 1),
]
SPLITS = [256, 512]

Lens = Sequence[int]


def attention_cases() -> Iterator[Case]:
    decodes = {"1x1k": [1024], "64x1k": [1024] * 64, "256x1k": [1024] * 256}
    for name, contexts in decodes.items():
        for split in SPLITS:
            for short in SHORT_SHAPES:
                yield _attention_case(
                    LLAMA, f"decode {name}", [1] * len(contexts), contexts, short=short, split=split
                )
    for name, contexts in {
        "8x1k": [1024] * 8, "1x32k": [32768], "16x16k": [16384] * 16, "512x300": [300] * 512,
        "spread": np.random.default_rng(0).integers(100, 2048, 256).tolist(),
    }.items():  # fmt: skip
        yield _attention_case(LLAMA, f"decode {name}", [1] * len(contexts), contexts)
    for name, contexts in {"1x1k": [1024], "64x1k": [1024] * 64}.items():
        for short in SHORT_SHAPES[:2]:
            yield _attention_case(QWEN, f"decode {name}", [1] * len(contexts), contexts, short=short)
    prefills: dict[str, tuple[Lens, Lens]] = {
        "1x16k": ([16384], [16384]), "8x2k": ([2048] * 8, [2048] * 8), "2k after 14k": ([2048], [16384]),
        "4x500": ([500] * 4, [500] * 4),
    }  # fmt: skip
    for name, (queries, contexts) in prefills.items():
        for long in LONG_SHAPES:
            yield _attention_case(LLAMA, f"prefill {name}", queries, contexts, long=long)
    yield _attention_case(QWEN, "prefill 1x16k", [16384], [16384])
    yield _attention_case(LLAMA, "mixed 64x1k + 448", [1] * 64 + [448], [1024] * 64 + [448])
    yield Case(
        "attention",
        "llama-3-8b prefill 1x16k",
        "torch sdpa",
        _sdpa_work,
        0,
        _attention_flops(LLAMA, [16384], [16384]),
    )


def _attention_flops(model: Model, queries: Lens, contexts: Lens) -> float:
    pairs = sum(q * c - q * (q - 1) // 2 for q, c in zip(queries, contexts, strict=True))
    return 4.0 * pairs * model.attended


def _attention_case(
    model: Model,
    name: str,
    queries: Lens,
    contexts: Lens,
    *,
    short: LaunchShape | None = None,
    long: LaunchShape | None = None,
    split: int | None = None,
) -> Case:
    shape = model.shape
    numbers = [
        f"({x.block_m},{x.block_n},{x.num_stages},{x.num_warps},{x.programs_per_multiprocessor})"
        for x in (short, long)
        if x
    ]
    return Case(
        group="attention",
        name=f"{model.name} {name}",
        variant=" ".join(numbers + ([f"split {split}"] if split else [])) or "default",
        make=partial(_attention_work, model, queries, contexts, short, long, split),
        bytes=sum(contexts) * 4 * shape.num_kv_heads * shape.head_dim + sum(queries) * 4 * model.attended,
        flops=_attention_flops(model, queries, contexts),
    )


def _attention_work(
    model: Model,
    queries: Lens,
    contexts: Lens,
    short: LaunchShape | None,
    long: LaunchShape | None,
    split: int | None,
    device: torch.device,
) -> Work:
    shape = model.shape
    kv_bytes = sum(contexts) * 4 * shape.num_kv_heads * shape.head_dim
    layers = 2 if device.type == "meta" else max(2, min(32, -(-COLD_BYTES // kv_bytes)))
    metadata, cache = paged_cache(shape, queries, contexts, layers, device)
    rule = None if split is None else SplitRule(shape.num_kv_heads, min_short_tokens=split)
    launches, qkv, out = attention_launches(model, metadata, cache, rule=rule, short=short, long=long)
    check = partial(attention_error, shape, metadata, qkv, cache[:, layers - 1], out, shape.head_dim**-0.5)
    return Work(launches, check)


def attention_launches(
    model: Model,
    metadata: AttentionMetadata,
    cache: torch.Tensor,
    *,
    rule: SplitRule | None = None,
    short: LaunchShape | None = None,
    long: LaunchShape | None = None,
) -> tuple[list[Launch], torch.Tensor, torch.Tensor]:
    """(a launch for each layer of the cache, queries, output) of one step; None: what the engine takes."""
    shape, device = model.shape, cache.device
    backend = TritonBackend(shape, device)
    if rule is not None:
        backend._split = rule
    plan = backend.plan(metadata)
    num_tokens = int(metadata.query_starts[-1])
    qkv = randn(device, num_tokens, model.qkv)
    out = torch.full((num_tokens, model.attended), torch.nan, dtype=BF16, device=device)
    chosen: dict[str, Any] = {}
    if short:
        chosen["short_launch"] = lambda *_, **__: short
    if long:
        chosen["long_launch"] = lambda *_: long

    def launch(layer: int) -> None:
        before = {name: getattr(attention_op, name) for name in chosen}
        vars(attention_op).update(chosen)
        try:
            heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
            scale = shape.head_dim**-0.5
            attention_op.attention(qkv, cache[:, layer, 0], cache[:, layer, 1], plan, out, *heads, scale)
        finally:
            vars(attention_op).update(before)

    return [partial(launch, layer) for layer in range(cache.shape[1])], qkv, out


def paged_cache(
    shape: AttentionShape, queries: Lens, contexts: Lens, layers: int, device: torch.device
) -> tuple[AttentionMetadata, torch.Tensor]:
    """(metadata, random cache [num_blocks, layers, 2, K, 16, D]) of one step over scattered blocks."""
    owned = [-(-length // 16) for length in contexts]
    ids = np.random.default_rng(0).permutation(sum(owned)).astype(np.int32)
    table = np.zeros((len(owned), max(owned)), np.int32)
    for row, count in enumerate(owned):
        table[row, :count] = ids[sum(owned[:row]) :][:count]
    size = (sum(owned), layers, 2, shape.num_kv_heads, 16, shape.head_dim)
    cache = torch.empty(size, dtype=BF16, device=device).normal_()
    metadata = AttentionMetadata(
        query_starts=np.concatenate(([0], np.cumsum(queries))).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        block_table=torch.from_numpy(table).to(device),
        block_size=16,
    )
    return metadata, cache


def attention_error(
    shape: AttentionShape,
    metadata: AttentionMetadata,
    qkv: torch.Tensor,
    layer: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> float:
    """Of the last rows of the first, a middle and the last request, and of all there being numbers."""
    if not torch.isfinite(out).all():
        return float("nan")
    num_requests = len(metadata.context_lens)
    errors = []
    for request in {0, num_requests // 2, num_requests - 1}:
        start, stop = (int(x) for x in metadata.query_starts[request : request + 2])
        context = int(metadata.context_lens[request])
        start = max(start, stop - 40)
        key = torch.arange(context, device=qkv.device)
        block = metadata.block_table[request, key // 16].long()
        group = shape.num_heads // shape.num_kv_heads
        keys, values = (
            layer[block, part, :, key % 16].double().repeat_interleave(group, 1) for part in (0, 1)
        )
        width = shape.num_heads * shape.head_dim
        rows = qkv[start:stop, :width].double().view(-1, shape.num_heads, shape.head_dim)
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        position = torch.arange(context - (stop - start), context, device=qkv.device)
        weights = scores.masked_fill(key > position[:, None], -torch.inf).softmax(-1)
        exact = torch.einsum("hqk,khd->qhd", weights, values).reshape(stop - start, width)
        errors.append(error_of(out[start:stop], exact))
    return max(errors)


def _sdpa_work(device: torch.device) -> Work:
    q = randn(device, 1, 32, 16384, 128)
    k, v = (randn(device, 1, 8, 16384, 128) for _ in range(2))
    if device.type == "meta":
        return Work([])
    run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    return Work([run])


# --- small ops ------------------------------------------------------------------------------------------------------


def small_cases() -> Iterator[Case]:
    for model in (LLAMA, QWEN):
        for rows in (1, 64, 2048):
            name = f"{model.name} T={rows}"
            width, inner = model.hidden, model.inner
            yield Case("add_rms_norm", name, "", partial(_norm_work, rows, width), 8 * rows * width)
            yield Case("gated_act", name, "", partial(_act_work, rows, inner), 6 * rows * inner)
            kv = model.shape.num_kv_heads * model.shape.head_dim
            moved = 4 * rows * (model.qkv - kv) + 6 * rows * kv + 512 * rows
            yield Case("rope_and_store", name, "", partial(_rope_work, model, rows), moved)
            yield Case("embedding", name, "", partial(_embedding_work, model, rows), 4 * rows * width)


def _copies(bytes_of_one: int, device: torch.device) -> int:
    return 1 if device.type == "meta" else max(1, min(16, (128 << 20) // bytes_of_one))


def _norm_work(rows: int, width: int, device: torch.device) -> Work:
    weight = torch.rand(width, device=device) + 0.5
    sets = [
        (randn(device, rows, width), randn(device, rows, width), randn(device, rows, width))
        for _ in range(_copies(6 * rows * width, device))
    ]

    def check() -> float:
        x, residual, out = sets[-1]
        total = (x + residual).double()
        add_rms_norm(x, residual, weight, 1e-5, out)
        return error_of(out, total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double())

    return Work([partial(add_rms_norm, x, r, weight, 1e-5, out) for x, r, out in sets], check)


def _act_work(rows: int, inner: int, device: torch.device) -> Work:
    sets = [
        (randn(device, rows, 2 * inner), randn(device, rows, inner))
        for _ in range(_copies(6 * rows * inner, device))
    ]

    def check() -> float:
        gate, up = sets[-1][0].double().chunk(2, -1)
        return error_of(sets[-1][1], F.silu(gate) * up)

    return Work([partial(gated_act, x, "silu", out) for x, out in sets], check)


def _rope_work(model: Model, rows: int, device: torch.device) -> Work:
    shape = model.shape
    norm = torch.ones(shape.head_dim, device=device) if model.has_qk_norm else None
    blocks = -(-rows // 16)
    cache = torch.zeros((blocks, 4, 2, shape.num_kv_heads, 16, shape.head_dim), dtype=BF16, device=device)
    cos_sin = torch.randn((4096, shape.head_dim), device=device)
    positions, slots = torch.arange(rows, device=device), torch.randperm(rows, device=device)
    sets = [randn(device, rows, model.qkv) for _ in range(_copies(2 * rows * model.qkv, device))]
    return Work(
        [
            partial(
                rope_and_store, qkv, norm, norm, 1e-6, cos_sin, positions, slots, cache[:, 1, 0], cache[:, 1, 1],
                shape.num_heads, shape.num_kv_heads, shape.head_dim,
            )
            for qkv in sets
        ]
    )  # fmt: skip


def _embedding_work(model: Model, rows: int, device: torch.device) -> Work:
    table = randn(device, model.vocab, model.hidden)
    out = torch.empty((rows, model.hidden), dtype=BF16, device=device)
    ids = [torch.randint(0, model.vocab, (rows,), device=device) for _ in range(8)]
    return Work(
        [partial(embedding, some, table, out) for some in ids], lambda: error_of(out, table[ids[-1]].double())
    )


# --- sampling -------------------------------------------------------------------------------------------------------


def sampling_cases() -> Iterator[Case]:
    vocab = LLAMA.vocab
    for rows in (1, 64, 256):
        size = 4 * rows * vocab
        for variant, spread, filters in (
            ("argmax", 3.0, None),
            ("plain", 3.0, ""),
            ("top_k top_p", 3.0, "kp"),
            ("top_p flat", 0.1, "p"),
            ("min_p", 3.0, "m"),
        ):
            reads = 1 if filters is None else 2
            yield Case(
                "sampling",
                f"R={rows}",
                variant,
                partial(_sampling_work, rows, vocab, spread, filters),
                reads * size,
            )
        yield Case("sampling", f"R={rows}", "a half and winners", partial(_slice_work, rows, vocab), size)
        yield Case("sampling", f"R={rows}", "logprobs of 20", partial(_logprobs_work, rows, vocab), 2 * size)


def _sampling_work(rows: int, vocab: int, spread: float, filters: str | None, device: torch.device) -> Work:
    logits = torch.randn((rows, vocab), device=device) * spread
    if filters is None:
        found: list[Any] = []

        def best() -> None:
            found[:] = sampling.row_argmax(logits)

        return Work([best], lambda: float((found[1] != logits.argmax(-1)).sum()))
    row_max = torch.empty(rows, device=device) if device.type == "meta" else logits.amax(-1)
    temperature = torch.full((rows,), 0.6, device=device)
    key = torch.randint(-(2**62), 2**62, (rows,), device=device)
    top_k = torch.full((rows,), 50, dtype=torch.int64, device=device) if "k" in filters else None
    top_p = torch.full((rows,), 0.9, device=device) if "p" in filters else None
    min_p = torch.full((rows,), 0.05, device=device) if "m" in filters else None
    tokens: list[torch.Tensor] = []

    def draw() -> None:
        tokens[:] = [sampling.sample_rows(logits, row_max, temperature, key, top_k, top_p, min_p)]

    def check() -> float:
        """Share of rows whose token is not the winner of the sorted filtered distribution, beyond rounding."""
        weights = ((logits.double() - row_max.double()[:, None]) / temperature.double()[:, None]).exp()
        if min_p is not None:
            weights[weights < min_p.double()[:, None]] = 0
        if top_k is not None:
            weights[weights < weights.topk(50, -1).values[:, -1:]] = 0
        if top_p is not None:
            falling = weights.sort(-1, descending=True).values
            enough = falling.cumsum(-1) >= 0.9 * falling.sum(-1, keepdim=True)
            edge = falling.gather(1, enough.int().argmax(-1, keepdim=True))
            weights[weights < edge * (1 - 1e-6)] = 0
        scores = weights / exponentials(key, vocab)
        return float(
            (scores.gather(1, tokens[0][:, None])[:, 0] < scores.amax(-1) * (1 - 1e-4)).double().mean()
        )

    return Work([draw], check)


def _slice_work(rows: int, vocab: int, device: torch.device) -> Work:
    """What one of two ranks does for a draw: the best and the race of its half, and both comparisons of winners."""
    logits = torch.randn((rows, vocab), device=device) * 3
    halves = (logits[:, : vocab // 2].contiguous(), 0), (logits[:, vocab // 2 :].contiguous(), vocab // 2)
    temperature = torch.full((rows,), 0.6, device=device)
    key = torch.randint(-(2**62), 2**62, (rows,), device=device)
    others = torch.stack([sampling.slice_argmax(*half) for half in halves])
    row_max = sampling.best_candidates(others)[0]
    raced = torch.stack(
        [sampling.slice_race(half, row_max, temperature, key, first) for half, first in halves]
    )
    found: list[Any] = []

    def pick() -> None:
        half, first = halves[1]
        others[1] = sampling.slice_argmax(half, first)
        best, _ = sampling.best_candidates(others)
        raced[1] = sampling.slice_race(half, best, temperature, key, first)
        found[:] = [sampling.best_candidates(raced)[1]]

    def check() -> float:
        whole = sampling.sample_rows(logits, logits.amax(-1), temperature, key)
        return float((found[0] != whole).sum())

    return Work([pick], check)


def _logprobs_work(rows: int, vocab: int, device: torch.device) -> Work:
    logits = torch.randn((rows, vocab), device=device) * 3
    found: list[torch.Tensor] = []

    def run() -> None:
        values, _ = sampling.top_tokens(logits, 20)
        found[:] = [values - sampling.log_normalizer(logits)[:, None]]

    return Work([run], lambda: error_of(found[0], logits.double().log_softmax(-1).topk(20, -1).values))


def all_cases() -> list[Case]:
    """Every case, the most wanted first."""
    return [*attention_cases(), *linear_cases(), *small_cases(), *sampling_cases()]
