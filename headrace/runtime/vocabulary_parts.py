"""VocabularyParts: tokens picked by ranks that hold logits of a part of the vocabulary each, without gathering those.

Every rank finds the best of its part; numbers and ids of the best are exchanged, 8 bytes a row. The noise of a part is
that of the whole vocabulary, and weights are relative to the whole row's best, so that the same token is picked, by the
same comparison, as from the whole row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.reference.noise import STEP
from headrace.kernels.registry import Op

_LOW_HALF = (1 << 32) - 1


class VocabularyParts:
    """One rank's part.

    Args:
        sampling: a ``sampling`` module of ``headrace.kernels`` that has ``race_rows``.
        all_gather: over the ranks, as ``Communicator.all_gather``.
        rank, size: this one, and how many have equal parts.
        width: tokens of a part.
    """

    def __init__(self, sampling: Any, all_gather: Op, rank: int, size: int, width: int) -> None:
        self._sampling = sampling
        self._all_gather = all_gather
        self._size = size
        self._first = rank * width
        self._noise_offset = (self._first * STEP) & _LOW_HALF

    def pick(
        self, logits: Tensor, temperature: Tensor, key: Tensor, is_random: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(tokens [R] int64, the largest logits [R]) of the whole rows; the same bits on all ranks.

        Args:
            logits: [R, width] float32, this rank's.
            temperature, key: as ``sample_rows`` takes them.
            is_random: [R], above 0 in the rows that draw; None: none does.
        """
        best_logits, tokens = self._compare(*self._sampling.row_argmax(logits))
        if is_random is not None:
            low = key & _LOW_HALF
            own_key = key - low + ((low + self._noise_offset) & _LOW_HALF)
            race = self._sampling.race_rows(logits, best_logits, temperature, own_key)
            tokens = torch.where(is_random > 0, self._compare(*race)[1], tokens)
        return tokens, best_logits

    def _compare(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The best of all ranks' (numbers [R], ids in their parts [R]); of equal ones the lowest id."""
        mine = torch.stack((values, (ids + self._first).float()), dim=1)  # ids are exact below 2**24
        everyone = mine.new_empty((len(mine), 2 * self._size))
        self._all_gather(mine, everyone)
        best, which = self._sampling.row_argmax(everyone[:, 0::2].contiguous())
        return best, everyone[:, 1::2].gather(1, which[:, None])[:, 0].long()
