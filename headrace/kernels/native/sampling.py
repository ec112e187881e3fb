"""The sampling functions of kernels/reference/sampling.py: picking the best token and drawing one are native."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.native.run import check_rows, run
from headrace.kernels.native.structs import DrawArgs, RowArgmaxArgs
from headrace.kernels.reference.noise import exponentials, keys_from
from headrace.kernels.reference.sampling import (
    best_candidates,
    filtered_weights,
    log_normalizer,
    pack_candidates,
    token_ranks,
    top_tokens,
)

__all__ = [
    "best_candidates",
    "filtered_weights",
    "log_normalizer",
    "pack_candidates",
    "row_argmax",
    "sample_rows",
    "slice_argmax",
    "slice_race",
    "token_ranks",
    "top_tokens",
]

_NUMBERS_PER_TOKEN = 4
"""What drawing costs a token of the vocabulary, in numbers that a plain op touches."""


def row_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    values, indices = best_of_rows(len(x))
    run(row_argmax_args(x, values, indices), x.numel(), len(x))
    return values, indices


def best_of_rows(num_rows: int) -> tuple[Tensor, Tensor]:
    """Room for what ``row_argmax`` writes: [R] float32, and [R] int64."""
    values = torch.empty(num_rows, dtype=torch.float32, device="cpu")
    return values, torch.empty(num_rows, dtype=torch.int64, device="cpu")


def row_argmax_args(x: Tensor, values: Tensor, indices: Tensor) -> RowArgmaxArgs:
    """The struct of ``row_argmax``, which writes to ``values`` [R] float32 and ``indices`` [R] int64."""
    check_rows(x=x)
    assert x.dtype == torch.float32
    return RowArgmaxArgs(
        rows=len(x),
        x=x.data_ptr(),
        values=values.data_ptr(),
        indices=indices.data_ptr(),
        stride=x.stride(0),
        width=x.shape[1],
    )


def sample_rows(
    logits: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    key: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    max_top_k: int = 0,
) -> Tensor:
    """See the reference."""
    if top_k is None and top_p is None and min_p is None:
        return _draw(logits, row_max.contiguous(), temperature.contiguous(), key)
    return _draw(
        filtered_weights(logits, row_max, temperature, top_k, top_p, min_p, max_top_k), None, None, key
    )


def slice_argmax(logits: Tensor, first_token: int) -> Tensor:
    """See the reference."""
    return pack_candidates(*row_argmax(logits), first_token)


def slice_race(logits: Tensor, row_max: Tensor, temperature: Tensor, key: Tensor, first_token: int) -> Tensor:
    """See the reference. Scores of winners are computed again in torch: they may differ in the last bits from those
    that the native race compared, which is as much as the logits of one number of ranks differ from another's."""
    moved = keys_from(key, first_token)
    tokens = _draw(logits, row_max.contiguous(), temperature.contiguous(), moved)
    weights = (logits.gather(1, tokens[:, None])[:, 0] - row_max).div_(temperature).exp_()
    return pack_candidates(weights / exponentials(keys_from(moved, tokens), 1)[:, 0], tokens, first_token)


def _draw(x: Tensor, row_max: Tensor | None, temperature: Tensor | None, key: Tensor) -> Tensor:
    """A token a row, from logits, or from weights where there is no temperature."""
    check_rows(x=x)
    assert x.dtype == torch.float32 and key.dtype == torch.int64
    indices, key = torch.empty(len(x), dtype=torch.int64, device="cpu"), key.contiguous()
    args = DrawArgs(
        rows=len(x),
        x=x.data_ptr(),
        row_max=0 if row_max is None else row_max.data_ptr(),
        temperature=0 if temperature is None else temperature.data_ptr(),
        keys=key.data_ptr(),
        indices=indices.data_ptr(),
        stride=x.stride(0),
        width=x.shape[1],
    )
    run(args, x.numel() * _NUMBERS_PER_TOKEN, len(x))
    return indices
