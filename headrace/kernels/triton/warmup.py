"""Compiling ahead: the kernels that a model will need, in threads, while its weights are still being read.

A kernel compiles in about a second, mostly outside Python's lock, and is kept on disk by Triton. What the first prompt
needs comes first; what decoding needs follows. The ops are run for real, on the smallest tensors that have the model's
widths, so nothing here knows which kernels an op launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from headrace.kernels.triton.activation import gated_act
from headrace.kernels.triton.attention import WORK_KEY, attention
from headrace.kernels.triton.attention_work import PackedWork, pack
from headrace.kernels.triton.embedding import embedding
from headrace.kernels.triton.fused import linear_add, norm_gated_linear, norm_linear
from headrace.kernels.triton.linear import linear
from headrace.kernels.triton.norm import add_rms_norm, rms_norm
from headrace.kernels.triton.rope_and_store import rope_and_store
from headrace.kernels.triton.sampling import row_argmax, sample_rows

Call = Callable[[], object]

_OUTPUTS = 64
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ModelWidths:
    """What the kernels of a model depend on, of one rank.

    windows: of its layers, each once; None is full attention.
    has_qk_norm, activation: see the layers.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    dtype: torch.dtype
    has_qk_norm: bool = False
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float | None = None
    activation: str = "silu"


@dataclass(slots=True)
class WarmupReport:
    """seconds: of each call by name; those of one stage overlap.  total_s: from start to end."""

    seconds: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0


def warm_up(
    calls: dict[str, Call], num_threads: int = 8, begin_thread: Callable[[], None] | None = None
) -> WarmupReport:
    """Run the calls in threads, each of which begins with ``begin_thread``, and wait for them."""
    report = WarmupReport()

    def timed(name: str) -> None:
        start = time.perf_counter()
        calls[name]()
        report.seconds[name] = time.perf_counter() - start

    start = time.perf_counter()
    with ThreadPoolExecutor(num_threads, initializer=begin_thread) as pool:
        list(pool.map(timed, calls))
    report.total_s = time.perf_counter() - start
    return report


def first_token_calls(widths: ModelWidths, device: torch.device) -> dict[str, Call]:
    """What a prompt needs, up to its first token: eight kernels and the pick of the best token."""
    make = _Maker(widths, device)
    return {
        **make.attention_calls("prompts", 64),
        "rope_and_store": make.rope_and_store,
        "gated_act": lambda: gated_act(
            make.rows(2, 2 * widths.intermediate_size),
            widths.activation,
            make.rows(2, widths.intermediate_size),
        ),
        "add_rms_norm": lambda: add_rms_norm(
            make.hidden(2), make.hidden(2), make.norm(), _EPS, make.hidden(2)
        ),
        "rms_norm": lambda: rms_norm(make.hidden(2), make.norm(), _EPS, make.hidden(2)),
        "embedding": lambda: embedding(make.ids(), make.weight(widths.hidden_size), make.hidden(1)),
        "head": lambda: linear(
            make.hidden(1),
            make.weight(widths.hidden_size),
            None,
            torch.empty((1, _OUTPUTS), dtype=torch.float32, device=device),
        ),
        "best token": lambda: row_argmax(make.logits()),
    }


def decode_calls(widths: ModelWidths, device: torch.device) -> dict[str, Call]:
    """What tokens after the first need besides: attention of one row, linears of one row and of a few, drawing."""
    make = _Maker(widths, device)
    inputs = {widths.hidden_size, widths.num_heads * widths.head_dim, widths.intermediate_size}
    calls = make.attention_calls("decodes", 1)
    for num_rows in (1, 2):
        for width in inputs:
            calls[f"linear of {num_rows} x {width}"] = partial(make.linear, num_rows, width)
    for width in inputs - {widths.hidden_size}:
        calls[f"linear_add of {width}"] = partial(make.linear_add, width)
    hidden, norm = widths.hidden_size, make.norm
    calls["norm_linear"] = lambda: norm_linear(
        make.hidden(1), norm(), _EPS, make.weight(hidden), None, make.rows(1, _OUTPUTS)
    )
    calls["norm_gated_linear"] = lambda: norm_gated_linear(
        make.hidden(1),
        norm(),
        _EPS,
        make.weight(hidden),
        None,
        widths.activation,
        make.rows(1, _OUTPUTS // 2),
    )
    calls["drawing"] = make.draw
    return calls


class _Maker:
    """Small tensors with the model's widths."""

    def __init__(self, widths: ModelWidths, device: torch.device) -> None:
        self._widths = widths
        self._device = device
        self._heads = (widths.num_heads, widths.num_kv_heads, widths.head_dim)

    def rows(self, count: int, width: int) -> torch.Tensor:
        return torch.zeros((count, width), dtype=self._widths.dtype, device=self._device)

    def hidden(self, count: int) -> torch.Tensor:
        return self.rows(count, self._widths.hidden_size)

    def weight(self, num_inputs: int) -> torch.Tensor:
        return self.rows(_OUTPUTS, num_inputs)

    def linear(self, count: int, num_inputs: int) -> None:
        linear(self.rows(count, num_inputs), self.weight(num_inputs), None, self.rows(count, _OUTPUTS))

    def linear_add(self, num_inputs: int) -> None:
        linear_add(self.rows(1, num_inputs), self.weight(num_inputs), None, self.rows(1, _OUTPUTS))

    def norm(self) -> torch.Tensor:
        return torch.ones(self._widths.hidden_size, dtype=torch.float32, device=self._device)

    def ids(self, count: int = 1) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)

    def logits(self) -> torch.Tensor:
        return torch.zeros((1, self._widths.vocab_size), dtype=torch.float32, device=self._device)

    def draw(self) -> None:
        number = torch.ones(1, dtype=torch.float32, device=self._device)
        sample_rows(self.logits(), number, number, self.ids())

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        widths = self._widths
        shape = (2, 2, widths.num_kv_heads, widths.block_size, widths.head_dim)
        layer = torch.zeros(shape, dtype=widths.dtype, device=self._device)
        return layer[:, 0], layer[:, 1]

    def qkv(self, count: int) -> torch.Tensor:
        heads = self._widths.num_heads + 2 * self._widths.num_kv_heads
        return self.rows(count, heads * self._widths.head_dim)

    def rope_and_store(self) -> None:
        widths = self._widths
        norm = torch.ones(widths.head_dim, device=self._device) if widths.has_qk_norm else None
        cos_sin = torch.zeros((1, widths.head_dim), device=self._device)
        rope_and_store(
            self.qkv(1), norm, norm, _EPS, cos_sin, self.ids(), self.ids(), *self.cache(), *self._heads
        )

    def attention_calls(self, whose: str, num_rows: int) -> dict[str, Call]:
        """One for each kind of layer."""
        return {
            f"attention of {whose}, window {window}": partial(self.attention, num_rows, window)
            for window in self._widths.windows
        }

    def attention(self, num_rows: int, window: int | None) -> None:
        """Tokens of one request at position 0, in two splits that each see the same block, and their merging."""
        row = np.arange(num_rows, dtype=np.int32)
        arrays = {
            "query_rows": row,
            "row_positions": np.zeros_like(row),
            "item_request": np.zeros(2, np.int32),
            "item_kv_start": np.zeros(2, np.int32),
            "item_kv_end": np.ones(2, np.int32),
            "item_row_start": np.zeros(2, np.int32),
            "item_num_rows": np.full(2, num_rows, np.int32),
            "item_partial_start": np.array([0, num_rows], np.int32),
            "reduce_rows": row,
            "reduce_starts": np.arange(num_rows + 1, dtype=np.int32) * 2,
            "reduce_slots": np.stack((row, row + num_rows), axis=1).reshape(-1),
        }
        num_short = 2 if num_rows == 1 else 0
        buffer = torch.from_numpy(pack(arrays, num_short)).to(self._device)
        work = PackedWork(buffer, num_short, 2 - num_short, num_rows, 2 * num_rows)
        table = torch.zeros((1, 1), dtype=torch.int32, device=self._device)
        plan = SimpleNamespace(block_table=table, window=window, derived={WORK_KEY: work})
        out = self.rows(num_rows, self._widths.num_heads * self._widths.head_dim)
        attention(self.qkv(num_rows), *self.cache(), plan, out, *self._heads, 1.0, self._widths.soft_cap)
