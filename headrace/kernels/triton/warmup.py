"""Compiling ahead: the kernels that a model will need, in threads, while its weights are still being read.

A kernel compiles in about a second, mostly outside Python's lock, and is kept on disk by Triton. What the first prompt
needs comes first; what decoding needs follows. The ops are run for real, on the smallest tensors that have the model's
widths, so nothing here knows which kernels an op launches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton

from headrace.kernels.quantized_cache import KVFormats
from headrace.kernels.triton.activation import gated_act
from headrace.kernels.triton.attention import WORK_KEY, attention
from headrace.kernels.triton.attention_hopper_tiles import let_through, suits_hopper
from headrace.kernels.triton.attention_ring_tiles import WARM_UNITS, ring_launch, suits_ring
from headrace.kernels.triton.attention_tiles import MANY_UNITS, LaunchShape, short_launch
from headrace.kernels.triton.attention_work import PackedWork, pack
from headrace.kernels.triton.decode_stack import (
    DecodeStack,
    LayerTensors,
    Matrix,
    is_packed,
    num_programs_of,
    ring_tiles,
)
from headrace.kernels.triton.embedding import embedding
from headrace.kernels.triton.few_rows import WARM_ROWS, compile_few_rows, few_rows_shape, suits_few_rows
from headrace.kernels.triton.fused import gated_linear, norm_linear
from headrace.kernels.triton.linear import gemv_shape, linear
from headrace.kernels.triton.model_widths import ModelWidths, PackedForm, Product
from headrace.kernels.triton.norm import add_rms_norm, rms_norm
from headrace.kernels.triton.packed_warmup import (
    DECODE_ROWS,
    PROMPT_ROWS,
    empty_matrix,
    packed_calls,
    packed_vocabulary_calls,
)
from headrace.kernels.triton.rank_exchange import RankExchange
from headrace.kernels.triton.rope_and_store import rope_and_store
from headrace.kernels.triton.sampling import (
    best_candidates,
    log_normalizer,
    row_argmax,
    sample_rows,
    slice_argmax,
    slice_race,
    token_ranks,
    top_tokens,
)
from headrace.kernels.triton.warmup_caches import Cache, small_caches
from headrace.sampling_params import MAX_LOGPROBS

Call = Callable[[], object]

_EPS = 1e-6


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
    """What a prompt needs, up to its first token: eight kernels and the pick of the best token; the slowest first."""
    make = _Maker(widths, device)
    return {
        **packed_calls(widths, device, PROMPT_ROWS),
        **make.attention_calls("prompts", 64),
        "head": lambda: make.linear(1, *widths.head),
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
        "embedding": lambda: embedding(make.ids(), make.rows(1, widths.hidden_size), make.hidden(1)),
        "best token": make.best,
        **packed_vocabulary_calls(widths, device),
    }


def decode_calls(
    widths: ModelWidths, device: torch.device, exchange: RankExchange | None = None
) -> dict[str, Call]:
    """What later tokens need besides: attention of prompts by another kernel and of one row, linears of one row and of
    a few, drawing, with every combination of filters too, log-probabilities, and the ops that optimized plans put in
    place of others. The slowest are first; the last are asked for by some requests only.

    exchange: of one of several ranks.
    """
    make = _Maker(widths, device)
    calls = make.hopper_calls() | make.decode_attention_calls()
    if widths.has_stack:
        calls["decode_stack"] = lambda: compile_stack(widths, exchange)
    calls |= make.linear_calls()
    calls |= make.few_rows_calls()
    calls |= make.fused_calls()
    calls |= packed_calls(widths, device, DECODE_ROWS)
    calls["drawing"] = make.draw
    return calls | make.filtered_calls() | {"log-probabilities": make.logprobs}


def compile_stack(widths: ModelWidths, exchange: RankExchange | None = None) -> None:
    """A decode stack's kernel, without memory for one. Packed weights that the ring's tiles do not suit have none."""
    layer = _layer_of(widths)
    if is_packed(layer):
        num_programs = num_programs_of(layer.k_cache.device, exchange)
        if ring_tiles(layer, num_programs) is None:
            return
    heads = (widths.num_heads, widths.num_kv_heads, widths.head_dim)
    DecodeStack([layer] * widths.num_layers, _EPS, 1.0, heads, widths.activation, exchange).compile()


def _layer_of(widths: ModelWidths) -> LayerTensors:
    empty = partial(torch.empty, dtype=widths.dtype, device="meta")

    def matrix(sizes: tuple[int, int], form: PackedForm | None) -> Matrix:
        return empty(sizes) if form is None else empty_matrix(form, sizes, torch.device("meta"))

    norm = torch.empty(widths.hidden_size, dtype=torch.float32, device="meta")
    head_norm = (
        torch.empty(widths.head_dim, dtype=torch.float32, device="meta") if widths.has_qk_norm else None
    )
    (forms,) = widths.layer_forms
    blocks = empty((1, widths.num_layers, 2, widths.num_kv_heads, widths.block_size, widths.head_dim))
    return LayerTensors(
        qkv=matrix(widths.qkv, forms.q_proj),
        bias=empty(widths.qkv[0]) if widths.has_qkv_bias else None,
        output=matrix(widths.output, forms.o_proj),
        gate_up=matrix(widths.gate_up, forms.gate_proj),
        down=matrix(widths.down, forms.down_proj),
        norm_1=norm,
        norm_2=norm,
        q_norm=head_norm,
        k_norm=head_norm,
        k_cache=blocks[:, 0, 0],
        v_cache=blocks[:, 0, 1],
        common=(),
        cos_sin=torch.empty((1, widths.head_dim), dtype=torch.float32, device="meta"),
    )


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

    def weight(self, num_outputs: int, num_inputs: int) -> torch.Tensor:
        """Of as many rows as the model's, since tiles depend on that, which all are the same memory."""
        return self.rows(1, num_inputs).expand(num_outputs, num_inputs)

    def bias(self, num_outputs: int, has_bias: bool) -> torch.Tensor | None:
        return self.rows(1, num_outputs)[0] if has_bias else None

    def linear(
        self,
        count: int,
        num_outputs: int,
        num_inputs: int,
        has_bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        out = torch.empty((count, num_outputs), dtype=dtype, device=self._device)
        linear(
            self.rows(count, num_inputs),
            self.weight(num_outputs, num_inputs),
            self.bias(num_outputs, has_bias),
            out,
        )

    def linear_calls(self) -> dict[str, Call]:
        """Linears of one row that differ from each other."""
        shapes: dict[Any, tuple[int, int, bool]] = {}
        for product in self._widths.products:
            if product.form is None:
                sizes, has_bias = (product.num_outputs, product.num_inputs), product.has_bias
                shapes[gemv_shape(*sizes), sizes[1], has_bias] = (*sizes, has_bias)
        return {
            f"linear of {num_inputs} to {num_outputs}": partial(
                self.linear, 1, num_outputs, num_inputs, has_bias, self._widths.dtype
            )
            for num_outputs, num_inputs, has_bias in shapes.values()
        }

    def few_rows_calls(self) -> dict[str, Call]:
        """Linears of a few rows whose kernels differ from each other; more rows are the library's."""
        widths = self._widths
        head = Product(*widths.head, False, widths.head_form)
        linears = [(product, widths.dtype) for product in widths.products] + [(head, torch.float32)]
        calls: dict[str, Call] = {}
        for num_rows, (product, out_dtype) in itertools.product(WARM_ROWS, linears):
            sizes, has_bias = (product.num_outputs, product.num_inputs), product.has_bias
            shape = few_rows_shape(num_rows, *sizes)
            if product.form is None and shape is not None and suits_few_rows(widths.dtype):
                calls[f"{shape}, {out_dtype}, bias {has_bias}"] = partial(
                    compile_few_rows, num_rows, sizes, widths.dtype, out_dtype, has_bias=has_bias
                )
        return calls

    def fused_calls(self) -> dict[str, Call]:
        """What optimized plans have in place of other ops, where layers are no stack and these linears dense."""
        widths, calls = self._widths, dict[str, Call]()
        if widths.has_stack:
            return calls
        if any(forms.qkv == (None, None, None) for forms in widths.layer_forms):
            calls["norm_linear"] = self.norm_linear
        if any(forms.gate_up == (None, None) for forms in widths.layer_forms):
            calls["gated_linear"] = self.gated_linear
        return calls

    def norm_linear(self) -> None:
        num_outputs, num_inputs = self._widths.qkv
        bias = self.bias(num_outputs, self._widths.has_qkv_bias)
        weight = self.weight(num_outputs, num_inputs)
        norm_linear(self.hidden(1), self.norm(), _EPS, weight, bias, self.rows(1, num_outputs))

    def gated_linear(self) -> None:
        widths = self._widths
        weight, out = self.weight(*widths.gate_up), self.rows(1, widths.intermediate_size)
        gated_linear(self.hidden(1), weight, None, widths.activation, out)

    def norm(self) -> torch.Tensor:
        return torch.ones(self._widths.hidden_size, dtype=torch.float32, device=self._device)

    def ids(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self._device)

    def logits(self) -> torch.Tensor:
        return torch.zeros((1, self._widths.vocab_size), dtype=torch.float32, device=self._device)

    def best(self) -> None:
        if self._widths.num_slices == 1:
            row_argmax(self.logits())
        else:
            best_candidates(slice_argmax(self.logits(), 0).repeat(self._widths.num_slices, 1, 1))

    def draw(self) -> None:
        number = torch.ones(1, dtype=torch.float32, device=self._device)
        if self._widths.num_slices == 1:
            sample_rows(self.logits(), number, number, self.ids())
        else:
            slice_race(self.logits(), number, number, self.ids(), 0)

    def whole_logits(self) -> torch.Tensor:
        """Of the whole vocabulary, which filters and log-probabilities see on each rank."""
        size = self._widths.vocab_size * self._widths.num_slices
        return torch.zeros((1, size), dtype=torch.float32, device=self._device)

    def filtered_calls(self) -> dict[str, Call]:
        """Drawing by rows that ask for filters: all of a step have those that one of them has."""
        calls: dict[str, Call] = {}
        for kept in itertools.product((True, False), repeat=3):
            names = [name for name, is_kept in zip(("top_k", "top_p", "min_p"), kept, strict=True) if is_kept]
            if names:
                calls[f"drawing by {', '.join(names)}"] = partial(self.draw_filtered, *kept)
        return calls

    def draw_filtered(self, has_top_k: bool, has_top_p: bool, has_min_p: bool) -> None:
        number = torch.ones(1, dtype=torch.float32, device=self._device)
        sample_rows(
            self.whole_logits(),
            number,
            number,
            self.ids(),
            self.ids() if has_top_k else None,
            number if has_top_p else None,
            number if has_min_p else None,
        )

    def logprobs(self) -> None:
        logits = self.whole_logits()
        token_ranks(logits, logits[:, 0])
        top_tokens(logits, MAX_LOGPROBS)
        log_normalizer(logits)

    def cache(self) -> tuple[Cache, Cache]:
        widths = self._widths
        return small_caches(
            widths.kv_type or widths.dtype,
            widths.num_kv_heads,
            widths.block_size,
            widths.head_dim,
            self._device,
        )

    def qkv(self, count: int) -> torch.Tensor:
        heads = self._widths.num_heads + 2 * self._widths.num_kv_heads
        return self.rows(count, heads * self._widths.head_dim)

    def rope_and_store(self) -> None:
        widths = self._widths
        norm = (
            torch.ones(widths.head_dim, dtype=torch.float32, device=self._device)
            if widths.has_qk_norm
            else None
        )
        cos_sin = torch.zeros((1, widths.head_dim), dtype=torch.float32, device=self._device)
        rope_and_store(
            self.qkv(1), norm, norm, _EPS, cos_sin, self.ids(), self.ids(), *self.cache(), *self._heads
        )

    def attention_calls(self, whose: str, num_rows: int, num_tokens: int | None = None) -> dict[str, Call]:
        """One for each kind of layer; ``num_tokens`` of a step, if more than the rows."""
        return {
            f"attention of {whose}, window {window}": partial(
                self.attention, num_rows, window, num_tokens or num_rows
            )
            for window in self._widths.windows
        }

    def hopper_calls(self) -> dict[str, Call]:
        """Prompts by the kernel that is held back until it is compiled."""
        widths = self._widths
        is_plain = widths.kv_type in (None, widths.dtype) and widths.dtype != torch.float32
        heads = (widths.num_heads, widths.num_kv_heads, widths.head_dim, widths.block_size)
        if not (is_plain and None in widths.windows and widths.soft_cap is None and suits_hopper(*heads)):
            return {}
        return {"long tiles of prompts": self.hopper_tiles}

    def hopper_tiles(self) -> None:
        with let_through():
            self.attention(64, None, 64)

    def decode_attention_calls(self) -> dict[str, Call]:
        """Of steps of so many tokens that every launch is among them."""
        calls: dict[str, Call] = {}
        num_kv_heads, seen = self._widths.num_kv_heads, set()
        for units in sorted({1, MANY_UNITS, *WARM_UNITS}):
            num_tokens = -(-units // num_kv_heads)
            launch = self._decode_launch(num_tokens * num_kv_heads)
            if launch not in seen:
                calls |= self.attention_calls(f"decodes in a step of {num_tokens}", 1, num_tokens)
            seen.add(launch)
        return calls

    def _decode_launch(self, row_units: int) -> LaunchShape:
        widths = self._widths
        has_ring = suits_ring(widths.num_heads, widths.num_kv_heads, widths.head_dim)
        if widths.is_coded and has_ring and widths.soft_cap is None:
            return ring_launch(row_units)
        group, block_d = widths.num_heads // widths.num_kv_heads, triton.next_power_of_2(widths.head_dim)
        is_quantized = isinstance(widths.kv_type, KVFormats)
        return short_launch(group, block_d, widths.dtype, row_units, is_quantized=is_quantized)

    def attention(self, num_rows: int, window: int | None, num_tokens: int) -> None:
        """Tokens of one request at position 0, in two splits that each see the same block, and their merging, in a
        step of ``num_tokens``."""
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
        out = self.rows(num_tokens, self._widths.num_heads * self._widths.head_dim)
        attention(self.qkv(num_tokens), *self.cache(), plan, out, *self._heads, 1.0, self._widths.soft_cap)
