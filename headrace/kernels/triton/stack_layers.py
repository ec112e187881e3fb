"""stack_layers: the layers of a recorded forward of one token, found among its calls and put into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.kernels.op_plan import OpCall, OpPlan, Symbol
from headrace.kernels.triton.decode_stack import (
    DecodeStack,
    LayerTensors,
    Matrix,
    is_head_dim_stacked,
    is_packed,
    num_programs_of,
    offset_between,
    ring_tiles,
    tensors_of,
)
from headrace.kernels.triton.norm import add_rms_norm
from headrace.kernels.triton.rank_exchange import RankExchange
from headrace.kernels.triton.word_matrix import WordMatrix

LAYER_OPS = (
    "linear",
    "rope_and_store",
    "attention",
    "linear",
    "add_rms_norm",
    "linear",
    "gated_act",
    "linear",
)
"""What follows a layer's first norm."""

EMBEDDINGS = ("embedding", "embedding_packed")


def stack_layers(plan: OpPlan, exchange: RankExchange | None = None) -> OpPlan | None:
    """The plan with all its layers as one call, or None: they are not of the kind, or not alike.

    For plans of one token in a 16-bit type. Ranks have one all together or none: whether layers are alike may hang on
    numbers, as the type of packed weights' scales does, and each rank has its own.

    Args:
        exchange: with the other ranks, where the plan is one rank's and its sums are fused (``fuse_reductions``).
    """
    stacked = _stacked(plan, exchange)
    is_everywhere = exchange is None or exchange.all_agree(stacked is not None)
    return stacked if is_everywhere else None


def _stacked(plan: OpPlan, exchange: RankExchange | None) -> OpPlan | None:
    add_norm = "add_rms_norm" if exchange is None else "all_reduce_add_norm"
    begin = 1 if exchange is None else 2
    calls, length = plan.calls, 1 + len(LAYER_OPS)
    num_layers, rest = divmod(len(calls) - begin - 1, length)
    if rest or num_layers < 1 or calls[0].name not in EMBEDDINGS or calls[-1].name != add_norm:
        return None
    if exchange is not None and (calls[1].name != "all_reduce" or calls[1].args != (calls[0].args[2],)):
        return None
    found = [
        _layer(calls[begin + length * index :][:length], index == 0, add_norm) for index in range(num_layers)
    ]
    layers = [layer for layer in found if layer is not None]
    if len(layers) < num_layers or any(not _is_alike(layers[0], layer) for layer in layers):
        return None
    if plan.result.dtype != layers[0].k_cache.dtype:
        return None  # packed weights suit any activations, but the stack has one type for them and the cache
    residual, hidden, attention_plan, positions, slots, eps, scale, heads, kind = layers[0].common
    if calls[0].args[2] != residual or calls[-1].args[:2] != (hidden, residual):
        return None
    num_programs = num_programs_of(layers[0].k_cache.device, exchange)
    needs_ring = exchange is not None or is_packed(layers[0])
    if needs_ring and ring_tiles(layers[0], num_programs) is None:
        return None
    stack = DecodeStack(layers, eps, scale, heads, kind, exchange)
    args = (residual, hidden, attention_plan, positions, slots)
    symbols = tuple((place, value.index) for place, value in enumerate(args))
    last = OpCall("add_rms_norm", add_rms_norm, calls[-1].args, calls[-1].symbols)
    return OpPlan(
        [*calls[:begin], OpCall("decode_stack", stack, args, symbols), last], plan.buffers, plan.result
    )


def _layer(calls: Sequence[OpCall], is_first: bool, add_norm: str) -> LayerTensors | None:
    """A layer's tensors, if its calls are those of a plain decoder layer and linked as in one."""
    norm, *rest = (_as_linear(call) for call in calls)
    if norm.name != ("rms_norm" if is_first else add_norm):
        return None
    if tuple(call.name for call in rest) != tuple(
        add_norm if name == "add_rms_norm" else name for name in LAYER_OPS
    ):
        return None
    qkv, rope, attention, output, norm_2, gate_up, act, down = rest
    hidden, residual, norm_weight, eps, normed = norm_2.args
    entry = (
        (residual, norm.args[-3], eps, hidden) if is_first else (hidden, residual, norm.args[-3], eps, hidden)
    )
    heads, scale, soft_cap = rope.args[9:], attention.args[8], attention.args[9]
    linked = (
        norm.args == entry
        and normed == hidden
        and _is_whole(qkv, hidden, rope.args[0])
        and attention.args[0] == rope.args[0]
        and _is_whole(output, attention.args[4], hidden)
        and _is_whole(gate_up, hidden, act.args[0])
        and _is_whole(down, act.args[2], hidden)
        and attention.args[5:8] == heads
        and soft_cap is None
        and not any(linear.args[2] is not None for linear in (output, gate_up, down))
    )
    if not linked:
        return None
    plan, positions, slots = attention.args[3], rope.args[5], rope.args[6]
    common = (residual, hidden, plan, positions, slots, eps, scale, heads, act.args[1])
    if not all(isinstance(value, Symbol) for value in common[:5]) or rope.args[3] != eps:
        return None
    return LayerTensors(
        qkv.args[1], qkv.args[2], output.args[1], gate_up.args[1], down.args[1], norm.args[-3], norm_weight,
        rope.args[1], rope.args[2], rope.args[7], rope.args[8], common, rope.args[4],
    )  # fmt: skip


def _as_linear(call: OpCall) -> OpCall:
    """A product with packed weights and inputs that are not rounded is a linear like any other."""
    if call.name != "linear_packed" or call.args[5] != 32:
        return call
    return OpCall("linear", call.op, call.args[:5], call.symbols)


def _is_whole(linear: OpCall, x: Any, out: Any) -> bool:
    """Whether a linear reads ``x`` and writes ``out`` from its first column on."""
    return linear.args[0] == x and linear.args[3] == out and linear.args[4] == 0


def _is_alike(first: LayerTensors, other: LayerTensors) -> bool:
    norms = [(layer.norm_1, layer.norm_2) for layer in (first, other)]
    caches = [(layer.k_cache, layer.v_cache) for layer in (first, other)]
    num_queries, head_dim = first.common[7][0], first.common[7][2]
    if not all(isinstance(cache, torch.Tensor) for pair in caches for cache in pair):
        return False  # quantized: codes and scales
    dtype, block_size = first.k_cache.dtype, first.k_cache.shape[2]
    return (
        first.common == other.common
        and first.cos_sin.data_ptr() == other.cos_sin.data_ptr()
        and all(_is_like(a, b, dtype) for a, b in zip(first.matrices, other.matrices, strict=True))
        and dtype in (torch.bfloat16, torch.float16)
        and all(norm.dtype == torch.float32 for norm in norms[1])
        and all(cache.dtype == dtype and cache.stride(0) == first.k_cache.stride(0) for cache in caches[1])
        and all(cache.stride()[1:] == (block_size * head_dim, head_dim, 1) for cache in caches[1])
        and (first.bias is None) == (other.bias is None)
        and not (is_packed(first) and first.bias is not None)
        and (first.q_norm is None) == (other.q_norm is None)
        and is_head_dim_stacked(head_dim)
        and num_queries * head_dim == first.output.shape[1]
        and all(offset_between(base, tensor) is not None for _, base, tensor in tensors_of(first, other))
    )


def _is_like(one: Matrix, other: Matrix, dtype: torch.dtype) -> bool:
    """Whether two layers' matrices are of one form, and weights that are not packed of the type."""
    if isinstance(one, WordMatrix) and isinstance(other, WordMatrix):
        return one.form == other.form and other.is_in_one_piece
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and other.dtype == dtype and other.is_contiguous()
