"""StepResult: what a step's forward has left on the device for sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.layers.sliced_logits import SlicedLogits
from headrace.runtime.sampler import PackedTokens


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Valid until the next step. S requests sample.

    hidden: [T or more, E], every token's hidden state.
    sampled_rows: [S] int64, rows of ``hidden``.
    sampled_places: [S] int64, where the tokens go in the flat token table.
    logits: of those rows, or None: not computed yet.
    picked: tokens that are in the table already, if no request asks for more than the best token or one drawn without
        filters; None: not picked yet.
    is_preparing: the step was recorded or captured for the next of its kind, too, so its time says nothing of theirs.
    """

    hidden: torch.Tensor
    sampled_rows: torch.Tensor
    sampled_places: torch.Tensor
    logits: SlicedLogits | None = None
    picked: PackedTokens | None = None
    is_preparing: bool = False
