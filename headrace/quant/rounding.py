"""round_weights: a dense matrix to small integers, each group's scale chosen for the smallest squared error."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix, GroupScales
from headrace.quant.precision import Rounding

_SHARES = (1.0, 0.92, 0.84, 0.75)
"""Shares of a group's range that 4 bits begin with: clipping the ends makes steps finer. 8 bits gain nothing by it."""

_REFITS = 2
"""How often scale and minimum are then fitted to the codes by least squares, and the codes found anew."""

_ROWS_AT_ONCE = 4096


def round_weights(weights: Tensor, rounding: Rounding) -> AffineMatrix:
    """weights [n, in], any float type -> codes with scales (fp16 where they fit, else fp32)."""
    group = rounding.group_columns or weights.shape[1]
    parts = [_round_rows(part.float(), rounding, group) for part in weights.split(_ROWS_AT_ONCE)]
    return AffineMatrix.stack(parts)


def _round_rows(weights: Tensor, rounding: Rounding, group: int) -> AffineMatrix:
    num_columns = weights.shape[1]
    rest = -num_columns % group
    # the last value again, so that padding does not widen the last group's range
    padded = weights if not rest else F.pad(weights[None], (0, rest), mode="replicate")[0]
    groups = padded.view(len(weights), -1, group)
    fit = _fit_ranges if rounding.has_zero_points else _fit_symmetric
    codes, scales, minimums = fit(groups, rounding.bits)
    codes = codes.view(len(weights), -1)[:, :num_columns]
    return AffineMatrix(codes, rounding.bits, group, scales, minimums)


def _fit_symmetric(groups: Tensor, bits: int) -> tuple[Tensor, GroupScales, None]:
    """w = s * q. The end of the range with the larger magnitude gets the code that has no counterpart, -2^(bits-1)."""
    if bits == 8:
        scales = as_scales(groups.abs().amax(-1) / 127.0)
        return _codes(groups, scales.widen(), 127, 0).to(torch.int8), scales, None
    half = 1 << (bits - 1)
    index = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, index).squeeze(-1)
    candidates = [largest * share / -half for share in _SHARES]
    candidates += [_refitted(groups, scale, half) for scale in candidates]
    best = _best_of([as_scales(scale) for scale in candidates], groups, half)
    return _shifted(groups, best.widen(), half), best, None


def _refitted(groups: Tensor, scale: Tensor, half: int) -> Tensor:
    for _ in range(_REFITS):
        codes = _shifted(groups, scale, half).float() - half
        squares = codes.square().sum(-1)
        scale = torch.where(squares > 0, (codes * groups).sum(-1) / squares.clamp_min(1.0), scale)
    return scale


def _best_of(candidates: list[GroupScales], groups: Tensor, half: int) -> GroupScales:
    """For each group, the scale with the smallest squared error."""
    best, lowest = candidates[0].values, None
    for candidate in candidates:
        scale = candidate.widen()
        numbers = _shifted(groups, scale, half).float() - half
        error = (numbers * scale.unsqueeze(-1) - groups).square_().sum(-1)
        if lowest is None:
            lowest = error
            continue
        is_better = error < lowest
        best = torch.where(is_better, candidate.values, best)
        lowest = torch.where(is_better, error, lowest)
    return GroupScales(best)


def _shifted(groups: Tensor, scale: Tensor, half: int) -> Tensor:
    codes = groups * _inverse(scale).unsqueeze(-1)
    return codes.round_().clamp_(-half, half - 1).add_(half).to(torch.uint8)


def _fit_ranges(groups: Tensor, bits: int) -> tuple[Tensor, GroupScales, GroupScales]:
    """w = s * q + m over the group's range."""
    top = (1 << bits) - 1
    low, high = groups.amin(-1), groups.amax(-1)
    middle, reach = (low + high) / 2, (high - low) / 2
    candidates = [
        (reach * (2 * share / top), middle - reach * share) for share in (_SHARES if bits == 4 else (1.0,))
    ]
    if bits == 4:
        candidates += [_refitted_range(groups, *candidate, top) for candidate in candidates]
    chosen, lowest = None, None
    for scales, minimums in candidates:
        scale, minimum = (as_scales(each).widen().unsqueeze(-1) for each in (scales, minimums))
        codes = _range_codes(groups, scale, minimum, top)
        error = (codes * scale + minimum - groups).square_().sum(-1)
        if chosen is None or lowest is None:
            chosen, lowest = [codes, scale, minimum], error
            continue
        is_better = error < lowest
        lowest = torch.where(is_better, error, lowest)
        new = (codes, scale, minimum)
        chosen = [torch.where(is_better.unsqueeze(-1), a, b) for a, b in zip(new, chosen, strict=True)]
    assert chosen is not None
    codes, scale, minimum = chosen
    if bits == 8:  # codes of 8 bits are signed
        return (
            (codes - 128).to(torch.int8),
            as_scales(scale.squeeze(-1)),
            GroupScales((minimum + 128 * scale).squeeze(-1)),
        )
    return codes.to(torch.uint8), as_scales(scale.squeeze(-1)), as_scales(minimum.squeeze(-1))


def _refitted_range(groups: Tensor, scale: Tensor, minimum: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The line through (code, weight) that fits a group best, as scale and minimum."""
    mean = groups.mean(-1)
    for _ in range(_REFITS):
        codes = _range_codes(groups, scale.unsqueeze(-1), minimum.unsqueeze(-1), top)
        middle = codes.mean(-1)
        apart = codes - middle.unsqueeze(-1)
        squares = apart.square().sum(-1)
        scale = torch.where(squares > 0, (apart * groups).sum(-1) / squares.clamp_min(0.5), scale)
        minimum = mean - scale * middle
    return scale, minimum


def _range_codes(groups: Tensor, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
    return ((groups - minimum) * _inverse(scale)).round_().clamp_(0, top)


def _codes(groups: Tensor, scale: Tensor, limit: int, offset: int) -> Tensor:
    codes = groups * _inverse(scale).unsqueeze(-1)
    return codes.round_().clamp_(-limit, limit).add_(offset)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def as_scales(values: Tensor) -> GroupScales:
    """fp16 where it loses no more than its rounding, in relation to the number or to the mean of all; else fp32."""
    narrow = values.half()
    magnitude = values.abs()
    is_close = (narrow.float() - values).abs() <= 2.0**-11 * (magnitude + magnitude.mean())
    return GroupScales(narrow if bool(is_close.all()) else values.float())


def exact_scales(values: Tensor) -> GroupScales:
    """fp16 where that holds every number exactly; else fp32."""
    narrow = values.half()
    return GroupScales(narrow if torch.equal(narrow.float(), values.float()) else values.float())
