"""DecodeStack: all layers of a recorded forward of one token as one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from headrace.kernels.op_plan import OpCall, OpPlan, Symbol
from headrace.kernels.triton import decode_stack_kernel as kernel
from headrace.kernels.triton.decode_stack_config import StackConfig
from headrace.kernels.triton.decode_stack_kernel import decode_stack_kernel
from headrace.kernels.triton.launch import INTERPRETED, compile_ahead, num_multiprocessors
from headrace.kernels.triton.row_product import Share

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

_TILE_NUMBERS = 1024 if INTERPRETED else 16384
_BLOCK_KEYS = 16 if INTERPRETED else 64
_MIN_DOT_ROWS = 16
_NUM_WARPS = 8
_MAX_SPLITS = 32
_ALIGNMENT = 16


class HasTable(Protocol):
    """An attention plan."""

    block_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's tensors and what it shares with the others."""

    qkv: torch.Tensor
    bias: torch.Tensor | None
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm_1: torch.Tensor
    norm_2: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    common: tuple[Any, ...]
    cos_sin: torch.Tensor


class DecodeStack:
    """The layers of a model, for one token at a time.

    Args:
        layers: of equal shapes, contiguous and aligned to 32 bytes.
        eps, scale: of norms and of scores.
        heads: (query heads, KV heads, head dim).
        kind: of the activation.
    """

    reads_block_table_only = True
    """Of the attention plan: a step needs none made (``OpPlan.reads_attention_work``)."""

    def __init__(
        self, layers: Sequence[LayerTensors], eps: float, scale: float, heads: tuple[int, int, int], kind: str
    ) -> None:
        first = layers[0]
        self._layers = layers  # keeps the tensors alive
        self._eps, self._scale = eps, scale
        device, dtype = first.qkv.device, first.qkv.dtype
        self._num_programs = 1 if INTERPRETED else num_multiprocessors(device)
        self._config = _config(layers, heads, kind, self._num_programs)
        self._shares = _shares(first, self._num_programs)
        self._places = _places(layers).to(device)
        config = self._config
        rows = heads[1] * config.max_splits * config.block_m
        self._partials = torch.empty((rows, config.head_dim), dtype=torch.float32, device=device)
        self._log_sums = torch.empty(rows, dtype=torch.float32, device=device)
        self._counters = torch.zeros(1 + heads[1], dtype=torch.int32, device=device)
        sizes = (config.hidden, first.qkv.shape[0], first.output.shape[1], first.down.shape[1])
        self._spare, self._qkv, self._attended, self._act = (
            torch.empty(size, dtype=dtype, device=device) for size in sizes
        )
        self._normed = torch.empty((self._num_programs, config.hidden), dtype=dtype, device=device)

    def __call__(
        self,
        residual: torch.Tensor,
        hidden: torch.Tensor,
        plan: HasTable,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """What the layers' ops do, from the embedding to the last product.

        Args:
            residual: [1, E], the embedding; then the stream without the last product.
            hidden: [1, E], the last product.
            plan: whose block table has the request in its first row.
            positions, slot_mapping: [1] int64.
        """
        self._counters.zero_()
        hidden.zero_()
        tensors = (residual, hidden, plan.block_table, positions, slot_mapping)
        decode_stack_kernel[(self._num_programs,)](*self._arguments(*tensors), **self._options)

    def compile(self) -> None:
        """Compile and load the kernel that calls will launch; nothing runs, so that the tensors may be of no device."""
        row = self._spare.unsqueeze(0)
        number = torch.zeros(1, dtype=torch.int64, device=row.device)
        table = torch.zeros((1, 1), dtype=torch.int32, device=row.device)
        compile_ahead(decode_stack_kernel, *self._arguments(row, row, table, number, number), **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        cooperative = {} if INTERPRETED else {"launch_cooperative_grid": True}
        return {"num_warps": _NUM_WARPS, **cooperative}

    def _arguments(
        self,
        residual: torch.Tensor,
        hidden: torch.Tensor,
        block_table: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> tuple[Any, ...]:
        first = self._layers[0]
        return (
            residual, hidden, self._spare, self._normed, self._qkv, self._attended, self._act, first.qkv, first.norm_1,
            first.k_cache, self._places, first.cos_sin, positions, slot_mapping, block_table,
            self._partials, self._log_sums, self._counters, first.k_cache.stride(0), self._scale, self._eps,
            self._config, *self._shares,
        )  # fmt: skip


def stack_layers(plan: OpPlan) -> OpPlan | None:
    """The plan with all its layers as one call, or None: they are not of the kind, or not alike.

    For plans of one token in a 16-bit type.
    """
    calls = plan.calls
    length = 1 + len(LAYER_OPS)
    num_layers, rest = divmod(len(calls) - 2, length)
    if rest or num_layers < 1 or calls[0].name != "embedding" or calls[-1].name != "add_rms_norm":
        return None
    found = [_layer(calls[1 + length * index :][:length], index == 0) for index in range(num_layers)]
    layers = [layer for layer in found if layer is not None]
    if len(layers) < num_layers or any(not _is_alike(layers[0], layer) for layer in layers):
        return None
    residual, hidden, attention_plan, positions, slots, eps, scale, heads, kind = layers[0].common
    if calls[0].args[2] != residual or calls[-1].args[:2] != (hidden, residual):
        return None
    stack = DecodeStack(layers, eps, scale, heads, kind)
    args = (residual, hidden, attention_plan, positions, slots)
    symbols = tuple((place, value.index) for place, value in enumerate(args))
    return OpPlan(
        [calls[0], OpCall("decode_stack", stack, args, symbols), calls[-1]], plan.buffers, plan.result
    )


def _layer(calls: Sequence[OpCall], is_first: bool) -> LayerTensors | None:
    """A layer's tensors, if its calls are those of a plain decoder layer and linked as in one."""
    norm, *rest = calls
    if norm.name != ("rms_norm" if is_first else "add_rms_norm"):
        return None
    if tuple(call.name for call in rest) != LAYER_OPS:
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


def _is_whole(linear: OpCall, x: Any, out: Any) -> bool:
    """Whether a linear reads ``x`` and writes ``out`` from its first column on."""
    return linear.args[0] == x and linear.args[3] == out and linear.args[4] == 0


def _is_alike(first: LayerTensors, other: LayerTensors) -> bool:
    weights = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in (first, other)]
    norms = [(layer.norm_1, layer.norm_2) for layer in (first, other)]
    caches = [(layer.k_cache, layer.v_cache) for layer in (first, other)]
    dtype, num_queries, head_dim = first.qkv.dtype, first.common[7][0], first.common[7][2]
    if not all(isinstance(cache, torch.Tensor) for pair in caches for cache in pair):
        return False  # quantized: codes and scales
    block_size = first.k_cache.shape[2]
    return (
        first.common == other.common
        and first.cos_sin.data_ptr() == other.cos_sin.data_ptr()
        and all(a.shape == b.shape for a, b in zip(*weights, strict=True))
        and all(w.dtype == dtype and w.is_contiguous() for w in weights[1])
        and dtype in (torch.bfloat16, torch.float16)
        and all(norm.dtype == torch.float32 for norm in norms[1])
        and all(cache.dtype == dtype and cache.stride(0) == first.k_cache.stride(0) for cache in caches[1])
        and all(cache.stride()[1:] == (block_size * head_dim, head_dim, 1) for cache in caches[1])
        and (first.bias is None) == (other.bias is None)
        and (first.q_norm is None) == (other.q_norm is None)
        and is_head_dim_stacked(head_dim)
        and num_queries * head_dim == first.output.shape[1]
        and all(_offset(base, tensor) is not None for _, base, tensor in _tensors(first, other))
    )


def is_head_dim_stacked(head_dim: int) -> bool:
    """Whether the kernel is made for heads of that size."""
    return head_dim >= 2 * _MIN_DOT_ROWS and head_dim & (head_dim - 1) == 0


def _config(
    layers: Sequence[LayerTensors], heads: tuple[int, int, int], kind: str, num_programs: int
) -> StackConfig:
    first = layers[0]
    num_heads, num_kv_heads, head_dim = heads
    hidden = first.qkv.shape[1]
    return StackConfig(
        num_layers=len(layers),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=first.k_cache.shape[2],
        is_silu=kind == "silu",
        has_qk_norm=first.q_norm is not None,
        has_bias=first.bias is not None,
        block_m=max(triton.next_power_of_2(num_heads // num_kv_heads), _MIN_DOT_ROWS),
        block_keys=_BLOCK_KEYS,
        max_splits=min(max(num_programs // num_kv_heads, 1), _MAX_SPLITS),
    )


def _shares(layer: LayerTensors, num_programs: int) -> tuple[Share, Share, Share, Share]:
    """How the four products of a layer are divided."""
    hidden, num_inner = layer.down.shape
    return (
        divide(layer.qkv.shape[0], hidden, num_programs),
        divide(hidden, layer.output.shape[1], num_programs),
        divide(num_inner, hidden, num_programs, num_matrices=2),
        divide(hidden, num_inner, num_programs),
    )


def divide(n: int, k: int, num_programs: int, num_matrices: int = 1) -> Share:
    """Tiles of a matrix [n, k] that leave the fewest programs idle; the tallest of those that are equal."""
    best, best_use = None, 0.0
    for block_n in (32, 16, 8, 4, 2):
        block_k = min(_TILE_NUMBERS // num_matrices // block_n, triton.next_power_of_2(k))
        while k % block_k and block_k > 256:
            block_k //= 2
        tiles, rounds = -(-n // block_n), -(-k // block_k)
        use = tiles / (-(-tiles // num_programs) * num_programs) * k / (rounds * block_k)
        if block_k >= 8 and use > best_use * 1.02:
            best, best_use = Share(n, k, block_n, block_k), use
    assert best is not None
    return best


def _places(layers: Sequence[LayerTensors]) -> torch.Tensor:
    """[L, 11] int64: where each layer's tensors begin, in elements from the first layer's."""
    table = torch.zeros((len(layers), kernel.NUM_PLACES), dtype=torch.int64)
    for index, layer in enumerate(layers):
        for place, base, tensor in _tensors(layers[0], layer):
            offset = _offset(base, tensor)
            assert offset is not None, "the tensors of alike layers are aligned"
            table[index, place] = offset
    return table


def _tensors(first: LayerTensors, layer: LayerTensors) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(column of the table, base, tensor) of a layer's tensors that exist."""
    columns = (
        (kernel.QKV, first.qkv, layer.qkv),
        (kernel.BIAS, first.qkv, layer.bias),
        (kernel.OUTPUT, first.qkv, layer.output),
        (kernel.GATE_UP, first.qkv, layer.gate_up),
        (kernel.DOWN, first.qkv, layer.down),
        (kernel.NORM_1, first.norm_1, layer.norm_1),
        (kernel.NORM_2, first.norm_1, layer.norm_2),
        (kernel.Q_NORM, first.norm_1, layer.q_norm),
        (kernel.K_NORM, first.norm_1, layer.k_norm),
        (kernel.K_CACHE, first.k_cache, layer.k_cache),
        (kernel.V_CACHE, first.k_cache, layer.v_cache),
    )
    return [(column, base, tensor) for column, base, tensor in columns if tensor is not None]


def _offset(base: torch.Tensor, tensor: torch.Tensor) -> int | None:
    """Elements from one tensor to another, or None if that is no multiple of the alignment."""
    offset, rest = divmod(tensor.data_ptr() - base.data_ptr(), base.element_size())
    return None if rest or offset % _ALIGNMENT else offset
