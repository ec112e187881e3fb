"""A whole decoding step of random weights in one CUDA graph: what the kernels make together, without the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from triton_cases import LLAMA, QWEN, Model, paged_cache, randn
from triton_timing import MEMORY_BYTES_PER_S, event_ms

from headrace.attention.base import PlanLimits
from headrace.attention.triton import TritonBackend
from headrace.kernels.triton.activation import gated_act
from headrace.kernels.triton.attention import attention
from headrace.kernels.triton.embedding import embedding
from headrace.kernels.triton.fused import linear_add, norm_gated_linear, norm_linear
from headrace.kernels.triton.launch import launch_options
from headrace.kernels.triton.linear import linear
from headrace.kernels.triton.norm import add_rms_norm, rms_norm
from headrace.kernels.triton.rope_and_store import rope_and_store
from headrace.kernels.triton.sampling import row_argmax

CONTEXT = 1024
EPS = 1e-6


@dataclass
class Layer:
    """The matrices of one."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Step:
    """One token of ``batch`` requests of 1k tokens each, from ids to the next ids.

    Args:
        is_fused: the fused ops instead of single ones; for a batch of one.
        layers: fewer than the model's, for compiling.
    """

    def __init__(
        self, model: Model, batch: int, device: torch.device, *, is_fused: bool, layers: int
    ) -> None:
        self.model, self.batch, self.is_fused = model, batch, is_fused
        shape = model.shape
        self.heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.layers = [
            Layer(*(randn(device, *size[:2]) * 0.02 for size in list(model.linears().values())[:4]))
            for _ in range(layers)
        ]
        self.table = randn(device, model.vocab, model.hidden)
        self.head = randn(device, model.vocab, model.hidden)
        self.norm = torch.ones(model.hidden, device=device)
        self.qk_norm = torch.ones(shape.head_dim, device=device) if model.has_qk_norm else None
        self.cos_sin = torch.randn((CONTEXT, shape.head_dim), device=device)
        metadata, cache = paged_cache(shape, [1] * batch, [CONTEXT] * batch, layers, device)
        self.cache = [(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(layers)]
        limits = PlanLimits(max_tokens=batch, max_requests=batch, max_context_tokens=CONTEXT)
        self.plan = TritonBackend(shape, device, limits).plan(metadata)
        self.positions = torch.full((batch,), CONTEXT - 1, dtype=torch.int64, device=device)
        self.slots = metadata.block_table[:, -1].long() * 16 + 15
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        widths = {
            "residual": model.hidden,
            "normed": model.hidden,
            "qkv": model.qkv,
            "attended": model.attended,
        }
        widths |= {"block": model.hidden, "gate_up": 2 * model.inner, "act": model.inner}
        self.buffers = {name: randn(device, batch, width) for name, width in widths.items()}
        self.logits = torch.empty((batch, model.vocab), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        """Run the step."""
        b = self.buffers
        embedding(self.ids, self.table, b["residual"])
        if not self.is_fused:
            rms_norm(b["residual"], self.norm, EPS, b["normed"])
        for layer, (k_cache, v_cache) in zip(self.layers, self.cache, strict=True):
            (self._fused_layer if self.is_fused else self._layer)(layer, k_cache, v_cache)
        if self.is_fused:
            rms_norm(b["residual"], self.norm, EPS, b["normed"])
        linear(b["normed"], self.head, None, self.logits)
        _, best = row_argmax(self.logits)
        self.ids.copy_(best)

    def _layer(self, layer: Layer, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        b = self.buffers
        linear(b["normed"], layer.qkv, None, b["qkv"])
        self._attend(k_cache, v_cache)
        linear(b["attended"], layer.out, None, b["block"])
        add_rms_norm(b["block"], b["residual"], self.norm, EPS, b["normed"])
        linear(b["normed"], layer.gate_up, None, b["gate_up"])
        gated_act(b["gate_up"], "silu", b["act"])
        linear(b["act"], layer.down, None, b["block"])
        add_rms_norm(b["block"], b["residual"], self.norm, EPS, b["normed"])

    def _fused_layer(self, layer: Layer, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        b = self.buffers
        residual = b["residual"]
        norm_linear(residual, self.norm, EPS, layer.qkv, None, b["qkv"])
        self._attend(k_cache, v_cache)
        linear_add(b["attended"], layer.out, None, residual)
        norm_gated_linear(residual, self.norm, EPS, layer.gate_up, None, "silu", b["act"])
        linear_add(b["act"], layer.down, None, residual)

    def _attend(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        b, norm = self.buffers, self.qk_norm
        places = (self.cos_sin, self.positions, self.slots, k_cache, v_cache)
        rope_and_store(b["qkv"], norm, norm, EPS, *places, *self.heads)
        attention(b["qkv"], k_cache, v_cache, self.plan, b["attended"], *self.heads, self.heads[2] ** -0.5)

    def limit_ms(self) -> float:
        """All weights and the KV of the contexts, by bandwidth."""
        model, shape = self.model, self.model.shape
        weights = sum(2 * outputs * inputs * count for outputs, inputs, count in model.linears().values())
        kv = self.batch * CONTEXT * 4 * shape.num_kv_heads * shape.head_dim * model.layers
        return 1e3 * (weights + kv) / MEMORY_BYTES_PER_S


@contextmanager
def dependent_launch(is_on: bool) -> Iterator[None]:
    """Within it kernels are launched with or without programmatic dependent launch."""
    options = launch_options()
    before = dict(options)
    if not is_on:
        options.clear()
        options["PDL"] = False
    try:
        yield
    finally:
        options.clear()
        options.update(before)


CONFIGS = [
    (model, batch, is_fused, has_pdl)
    for model in (QWEN, LLAMA)
    for batch, is_fused, has_pdl in (
        (1, False, False),
        (1, False, True),
        (1, True, True),
        (8, False, True),
        (64, False, False),
        (64, False, True),
        (256, False, True),
    )
]


def compile_steps(device: torch.device) -> list[Callable[[], None]]:
    """Actions that launch every kernel of the steps once."""

    def action(model: Model, batch: int, is_fused: bool, has_pdl: bool) -> None:
        with dependent_launch(has_pdl):
            Step(model, batch, device, is_fused=is_fused, layers=1)()

    return [lambda config=config: action(*config) for config in CONFIGS]


def measure_steps(device: torch.device) -> list[dict[str, object]]:
    """Milliseconds of each step in a graph, and of launching it without one."""
    results: list[dict[str, object]] = []
    for model, batch, is_fused, has_pdl in CONFIGS:
        torch.cuda.empty_cache()
        with dependent_launch(has_pdl):
            step = Step(model, batch, device, is_fused=is_fused, layers=model.layers)
            step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            host_ms = 1e3 * (time.perf_counter() - start)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        event_ms(graph.replay, 3)
        measured = min(event_ms(graph.replay, 20) for _ in range(3))
        results.append(
            {
                "model": model.name,
                "batch": batch,
                "fused": is_fused,
                "pdl": has_pdl,
                "ms": measured,
                "limit_ms": step.limit_ms(),
                "eager_host_ms": host_ms,
                "finite": bool(torch.isfinite(step.logits).all()),
            }
        )
        del graph, step
    return results
