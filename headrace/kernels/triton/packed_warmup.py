"""Compiling ahead what packed weights need: kernels run on matrices of few outputs, with the tiles of the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from headrace.kernels.triton.linear_packed import (
    MAX_TILED_ROWS,
    Shape,
    embedding_packed,
    linear_packed,
    packed_shape,
)
from headrace.kernels.triton.model_widths import ModelWidths, PackedForm
from headrace.kernels.triton.word_matrix import WordMatrix

PROMPT_ROWS = (64, MAX_TILED_ROWS + 1)
DECODE_ROWS = (1, 16)
_NUM_OUTPUTS = 16
"""Triton compiles multiples of 16 apart."""


def packed_calls(
    widths: ModelWidths, device: torch.device, num_rows: Sequence[int]
) -> dict[str, Callable[[], object]]:
    """Linears of so many rows that differ from each other; none where weights are not packed."""
    form = widths.packed
    if form is None:
        return {}
    calls: dict[tuple[Shape, int, bool], Callable[[], object]] = {}
    for sizes in (widths.gate_up, widths.down, widths.qkv, widths.output):
        has_bias = sizes == widths.qkv and widths.has_qkv_bias
        for count in num_rows:
            shape = _shape(form, sizes, count, widths.dtype)
            calls[shape, sizes[1], has_bias] = partial(
                _product, form, sizes, count, has_bias, widths.dtype, device, shape, widths.dtype
            )
    return {f"packed linear of {key[1]}, {key[0]}, bias {key[2]}": call for key, call in calls.items()}


def packed_vocabulary_calls(widths: ModelWidths, device: torch.device) -> dict[str, Callable[[], object]]:
    """The embedding, and the head of one row, in place of the dense ones of these names."""
    form = widths.packed_vocabulary
    if form is None:
        return {}

    def embed() -> None:
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        out = torch.empty((1, widths.hidden_size), dtype=widths.dtype, device=device)
        embedding_packed(ids, _few_outputs(form, widths.hidden_size, device), out)

    shape = _shape(form, widths.head, 1, widths.dtype)
    head = partial(_product, form, widths.head, 1, False, widths.dtype, device, shape, torch.float32)
    return {"head": head, "embedding": embed}


def _shape(form: PackedForm, sizes: tuple[int, int], count: int, dtype: torch.dtype) -> Shape:
    num_outputs, num_inputs = sizes
    few = _few_outputs(form, num_inputs, torch.device("cpu"))
    return packed_shape(count, replace(few, num_rows=num_outputs), dtype)


def _product(
    form: PackedForm,
    sizes: tuple[int, int],
    count: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    shape: Shape,
    out_dtype: torch.dtype,
) -> None:
    num_outputs, num_inputs = sizes
    x = torch.zeros((count, num_inputs), dtype=dtype, device=device)
    bias = torch.zeros(_NUM_OUTPUTS, dtype=torch.float32, device=device) if has_bias else None
    out = torch.empty((count, num_outputs), dtype=out_dtype, device=device)[:, :_NUM_OUTPUTS]
    linear_packed(x, _few_outputs(form, num_inputs, device), bias, out, shape=shape)


def _few_outputs(form: PackedForm, num_inputs: int, device: torch.device) -> WordMatrix:
    return empty_matrix(form, (_NUM_OUTPUTS, num_inputs), device)


def empty_matrix(form: PackedForm, sizes: tuple[int, int], device: torch.device) -> WordMatrix:
    """Of such weights, whose numbers do not matter."""
    group = form.group_columns or sizes[1]
    return WordMatrix.empty(sizes, form.bits, group, form.has_minimums, torch.float16, device)
