"""Compiling ahead what packed weights need: kernels run on matrices of few outputs, with the tiles of the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from headrace.kernels.triton.embedding import gather_rows
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
    """Linears of so many rows that differ from each other, in each form; none where weights are not packed."""
    calls: dict[tuple[int, PackedForm, Shape, bool], Callable[[], object]] = {}
    for product in widths.products:
        form, has_bias, num_inputs = product.form, product.has_bias, product.num_inputs
        if form is None:
            continue
        sizes = (product.num_outputs, num_inputs)
        for count in num_rows:
            shape = _shape(form, sizes, count, widths.dtype)
            calls[num_inputs, form, shape, has_bias] = partial(
                _product, form, sizes, count, has_bias, widths.dtype, device, shape, widths.dtype
            )
    return {
        f"packed linear of {num_inputs}, {form}, {shape}, bias {has_bias}": call
        for (num_inputs, form, shape, has_bias), call in calls.items()
    }


def packed_vocabulary_calls(widths: ModelWidths, device: torch.device) -> dict[str, Callable[[], object]]:
    """The embedding, and the head of one row, in place of the dense ones of these names, and what those had beside."""
    calls: dict[str, Callable[[], object]] = {}
    if (form := widths.head_form) is not None:
        shape = _shape(form, widths.head, 1, widths.dtype)
        calls["head"] = partial(
            _product, form, widths.head, 1, False, widths.dtype, device, shape, torch.float32
        )
    if widths.embedding_form is not None:
        calls["embedding"] = partial(_embed, widths.embedding_form, widths, device)
        calls["gather_rows"] = partial(_gather, widths, device)  # whose kernel is a dense embedding's, too
    return calls


def _embed(form: PackedForm, widths: ModelWidths, device: torch.device) -> None:
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.empty((1, widths.hidden_size), dtype=widths.dtype, device=device)
    embedding_packed(ids, _few_outputs(form, widths.hidden_size, device), out)


def _gather(widths: ModelWidths, device: torch.device) -> None:
    rows = torch.empty((1, widths.hidden_size), dtype=widths.dtype, device=device)
    gather_rows(rows, torch.zeros(1, dtype=torch.int64, device=device), torch.empty_like(rows))


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
