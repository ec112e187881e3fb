"""DecodeStack: all layers of one token as one launch.

Two kernels do it. ``ring_stack_kernel`` keeps memory busy while programs wait for each other, and can add up the parts
of several ranks; it is taken where its tiles suit the model's sizes. ``decode_stack_kernel`` takes any sizes, and
runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from headrace.kernels.triton.decode_stack_config import StackConfig
from headrace.kernels.triton.decode_stack_kernel import decode_stack_kernel
from headrace.kernels.triton.launch import (
    INTERPRETED,
    architecture,
    compile_ahead,
    max_shared_bytes,
    num_multiprocessors,
)
from headrace.kernels.triton.packed_ring_config import packed_ring_config
from headrace.kernels.triton.rank_exchange import RankExchange, Ranks
from headrace.kernels.triton.ring_stack_kernel import ring_stack_kernel
from headrace.kernels.triton.row_product import Share
from headrace.kernels.triton.stack_places import NUM_PLACES, Place
from headrace.kernels.triton.weight_ring import NUM_WARPS, RingConfig, ring_config
from headrace.kernels.triton.word_matrix import WordMatrix

_TILE_NUMBERS = 1024 if INTERPRETED else 16384
_BLOCK_KEYS = 16 if INTERPRETED else 64
_MIN_DOT_ROWS = 16
_MAX_SPLITS = 32
_ALIGNMENT = 16
_RING_ARCH = 80
"""From here on copies into shared memory run beside the program, and products take bf16."""
_PACKED_RING_ARCH = 90
"""From here on a group of warps can have registers of its own."""
_OTHER_BYTES = 14 << 10
"""Of shared memory, for what the ring's kernel passes between threads."""


class HasTable(Protocol):
    """An attention plan."""

    block_table: torch.Tensor


Matrix = torch.Tensor | WordMatrix


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's tensors and what it shares with the others. Its four matrices are all tensors or all packed."""

    qkv: Matrix
    bias: torch.Tensor | None
    output: Matrix
    gate_up: Matrix
    down: Matrix
    norm_1: torch.Tensor
    norm_2: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    common: tuple[Any, ...]
    cos_sin: torch.Tensor

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """In the order in which they are multiplied."""
        return self.qkv, self.output, self.gate_up, self.down


class DecodeStack:
    """The layers of a model, for one token at a time.

    Args:
        layers: of equal shapes, contiguous and aligned to 32 bytes.
        eps, scale: of norms and of scores.
        heads: (query heads, KV heads, head dim).
        kind: of the activation.
        exchange: with the other ranks of a tensor-parallel group, each of which has its part of every layer. Only
            where ``ring_tiles`` finds some.
    """

    reads_block_table_only = True
    """Of the attention plan: a step needs none made (``OpPlan.reads_attention_work``)."""

    def __init__(
        self,
        layers: Sequence[LayerTensors],
        eps: float,
        scale: float,
        heads: tuple[int, int, int],
        kind: str,
        exchange: RankExchange | None = None,
    ) -> None:
        first = layers[0]
        self._layers = layers  # keeps the tensors alive
        self._eps, self._scale = eps, scale
        device, dtype = first.k_cache.device, first.k_cache.dtype
        self._num_programs = num_programs_of(device, exchange)
        self._config = _config(layers, heads, kind, self._num_programs)
        self._ring = ring_tiles(first, self._num_programs)
        assert self._ring is not None or exchange is None, "only the kernel with a ring knows of ranks"
        assert self._ring is not None or not is_packed(first), (
            "only the kernel with a ring knows packed weights"
        )
        self._shares = _shares(first, self._num_programs) if self._ring is None else ()
        self._places = _places(layers).to(device)
        self._exchange = exchange or RankExchange(Ranks(), self._places, self._places, self._num_programs)
        config = self._config
        rows = heads[1] * config.max_splits * config.block_m
        self._partials = torch.empty((rows, config.head_dim), dtype=torch.float32, device=device)
        self._log_sums = torch.empty(rows, dtype=torch.float32, device=device)
        self._counters = torch.zeros(3 + heads[1], dtype=torch.int32, device=device)
        sizes = (config.hidden, first.qkv.shape[0], first.output.shape[1], first.down.shape[1])
        self._spare, self._qkv, self._attended, self._act = (
            torch.empty(size, dtype=dtype, device=device) for size in sizes
        )
        rows = self._num_programs if self._ring is None else 0
        self._normed = torch.empty((rows, config.hidden), dtype=dtype, device=device)

    def __call__(
        self,
        residual: torch.Tensor,
        hidden: torch.Tensor,
        plan: HasTable,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """What the layers' ops do, from the embedding to the last product (of several ranks, their sum).

        Args:
            residual: [1, E], the embedding; then the stream without the last product.
            hidden: [1, E], the last product.
            plan: whose block table has the request in its first row.
            positions, slot_mapping: [1] int64.
        """
        if self._ring is None:
            self._counters.zero_()
            hidden.zero_()
        kernel, args = self._launch(residual, hidden, plan.block_table, positions, slot_mapping)
        kernel[(self._num_programs,)](*args, **self._options)

    def compile(self) -> None:
        """Compile and load the kernel that calls will launch; nothing runs, so that the tensors may be of no device."""
        row = self._spare.unsqueeze(0)
        number = torch.zeros(1, dtype=torch.int64, device=row.device)
        table = torch.zeros((1, 1), dtype=torch.int32, device=row.device)
        kernel, args = self._launch(row, row, table, number, number)
        compile_ahead(kernel, *args, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        cooperative = {} if INTERPRETED else {"launch_cooperative_grid": True}
        return {"num_warps": NUM_WARPS, **cooperative}

    def _launch(
        self,
        residual: torch.Tensor,
        hidden: torch.Tensor,
        block_table: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> tuple[Any, tuple[Any, ...]]:
        """(kernel, its arguments)"""
        first, ring = self._layers[0], self._ring
        vectors = (residual, hidden, self._spare)
        tensors = (
            self._qkv, self._attended, self._act, numbers_of(first.qkv), first.norm_1, first.k_cache, self._places,
            first.cos_sin, positions, slot_mapping, block_table, self._partials, self._log_sums, self._counters,
        )  # fmt: skip
        numbers = (first.k_cache.stride(0), self._scale, self._eps, self._config)
        if ring is None:
            return decode_stack_kernel, (*vectors, self._normed, *tensors, *numbers, *self._shares)
        shared = (self._exchange.parts, self._exchange.arrivals)
        return ring_stack_kernel, (*vectors, *tensors, *shared, *numbers, ring, self._exchange.ranks)


def num_programs_of(device: torch.device, exchange: RankExchange | None) -> int:
    """Programs of a stack's launch."""
    if INTERPRETED:
        return 1
    return num_multiprocessors(device) if exchange is None else exchange.num_programs


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


def ring_tiles(layer: LayerTensors, num_programs: int) -> RingConfig | None:
    """The tiles of the kernel with a ring; None: they do not suit the layer's sizes, or the device."""
    if INTERPRETED or architecture() < _RING_ARCH:
        return None
    hidden, num_inner = layer.down.shape
    outputs = (layer.qkv.shape[0], hidden, num_inner, hidden)
    inputs = (hidden, layer.output.shape[1], hidden, num_inner)
    num_bytes = max_shared_bytes(numbers_of(layer.qkv).device) - _OTHER_BYTES
    packed = [matrix for matrix in layer.matrices if isinstance(matrix, WordMatrix)]
    if packed:
        if architecture() < _PACKED_RING_ARCH:
            return None
        return (
            packed_ring_config(packed, outputs, inputs, num_programs, num_bytes) if len(packed) == 4 else None
        )
    return ring_config(outputs, inputs, num_programs, num_bytes)


def is_packed(layer: LayerTensors) -> bool:
    """Whether its matrices are codes."""
    return any(isinstance(matrix, WordMatrix) for matrix in layer.matrices)


def numbers_of(matrix: Matrix) -> torch.Tensor:
    """The tensor of weights, or of words."""
    return matrix.codes if isinstance(matrix, WordMatrix) else matrix


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
    table = torch.zeros((len(layers), NUM_PLACES), dtype=torch.int64, device="cpu")
    for index, layer in enumerate(layers):
        for place, base, tensor in tensors_of(layers[0], layer):
            offset = offset_between(base, tensor)
            assert offset is not None, "the tensors of alike layers are aligned"
            table[index, place] = offset
    return table


def tensors_of(first: LayerTensors, layer: LayerTensors) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(column of the table, base, tensor) of a layer's tensors that exist."""
    weights = numbers_of(first.qkv)
    columns = (
        (Place.QKV, weights, numbers_of(layer.qkv)),
        (Place.BIAS, weights, layer.bias),
        (Place.OUTPUT, weights, numbers_of(layer.output)),
        (Place.GATE_UP, weights, numbers_of(layer.gate_up)),
        (Place.DOWN, weights, numbers_of(layer.down)),
        (Place.NORM_1, first.norm_1, layer.norm_1),
        (Place.NORM_2, first.norm_1, layer.norm_2),
        (Place.Q_NORM, first.norm_1, layer.q_norm),
        (Place.K_NORM, first.norm_1, layer.k_norm),
        (Place.K_CACHE, first.k_cache, layer.k_cache),
        (Place.V_CACHE, first.k_cache, layer.v_cache),
    )
    return [(column, base, tensor) for column, base, tensor in columns if tensor is not None]


def offset_between(base: torch.Tensor, tensor: torch.Tensor) -> int | None:
    """Elements from one tensor to another, or None if that is no multiple of the alignment."""
    offset, rest = divmod(tensor.data_ptr() - base.data_ptr(), base.element_size())
    return None if rest or offset % _ALIGNMENT else offset
