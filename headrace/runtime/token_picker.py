"""TokenPicker: the best token of each row, or one drawn without filters, wherever the row's logits lie.

Where the vocabulary is cut over ranks, each picks within its slice, and only the winners are exchanged: 8 bytes a row
and rank in place of 4 a token. The noise of a token does not depend on where it is drawn, so the winner of winners is
the token that one rank would take; all ranks see the same candidates, so all take the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.layers.sliced_logits import SlicedLogits, VocabularySlices
from headrace.runtime.row_parts import row_parts


class TokenPicker:
    """Picks from what ``SlicedLogits`` hold. Everything stays on the device, and may be captured in a graph.

    Args:
        kernels: a ``sampling`` module of ``headrace.kernels``.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def best(self, logits: SlicedLogits) -> tuple[Tensor, Tensor]:
        """([R] float32, [R] int64): each row's largest logit and its token, the lowest among equals."""
        slices = logits.slices
        if slices is None:
            values, tokens = self._kernels.row_argmax(logits.own)
            return values, tokens
        if slices.num_tokens:
            candidates = self._kernels.slice_argmax(logits.own, slices.first_token)
        else:
            candidates = _nobody(logits)
        return self._winners(slices, candidates)

    def draw(self, logits: SlicedLogits, best_logits: Tensor, temperature: Tensor, key: Tensor) -> Tensor:
        """[R] int64: a token a row; arguments as those of ``sample_rows`` without filters."""
        slices = logits.slices
        if slices is None:
            drawn: Tensor = self._kernels.sample_rows(logits.own, best_logits, temperature, key)
            return drawn
        if slices.num_tokens:
            candidates = self._race(logits, slices.first_token, best_logits, temperature, key)
        else:
            candidates = _nobody(logits)
        return self._winners(slices, candidates)[1]

    def _race(
        self, logits: SlicedLogits, first_token: int, best_logits: Tensor, temperature: Tensor, key: Tensor
    ) -> Tensor:
        """Candidates in parts of bounded memory; slices differ in width, so one exchange follows all parts."""
        own = logits.own
        found = [
            self._kernels.slice_race(own[part], best_logits[part], temperature[part], key[part], first_token)
            for part in row_parts(len(own), own.shape[1], own.device)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _winners(self, slices: VocabularySlices, candidates: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = self._kernels.best_candidates(slices.exchange(candidates))
        return values, tokens


def _nobody(logits: SlicedLogits) -> Tensor:
    """Candidates of a rank without tokens: they lose against everything of a rank that has some."""
    values = torch.full((len(logits),), -torch.inf, dtype=torch.float32, device=logits.padded.device)
    return torch.stack((values.view(torch.int32), torch.zeros_like(values, dtype=torch.int32)))
