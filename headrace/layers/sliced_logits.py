"""SlicedLogits: logits whose vocabulary is cut over ranks; whole rows are gathered where somebody reads whole rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.arena import Buffer
from headrace.kernels.registry import Op


class VocabularySlices:
    """The cut of a vocabulary over ranks, and what these exchange about it. All ranks call the same in the same order.

    Args:
        count: ranks.
        own: this rank's tokens; may be fewer on the last ranks, and none.
        vocab_size: V.
        all_gather: the collective.
        device: of the logits.

    Attributes:
        width: columns that each rank brings, those of the largest slice.
    """

    def __init__(
        self, count: int, own: slice, vocab_size: int, all_gather: Op, device: torch.device | str
    ) -> None:
        self.width = -(-vocab_size // count)
        self.first_token: int = own.start
        self.num_tokens: int = own.stop - own.start
        self._count = count
        self._vocab_size = vocab_size
        self._all_gather = all_gather
        # Not of the arena, which would reserve as many rows as a step has tokens.
        self._all = Buffer("all logits", self.width * count, torch.float32, torch.device(device))

    def reserve(self, num_rows: int) -> None:
        """Make room for so many whole rows."""
        self._all.reserve(num_rows)

    def gather(self, padded: Tensor) -> Tensor:
        """[R, V] of everyone's [R, width], valid until the next call; columns past a slice's end fall off."""
        gathered = self._all.rows(len(padded))
        self._all_gather(padded, gathered)
        return gathered[:, : self._vocab_size]

    def exchange(self, candidates: Tensor) -> Tensor:
        """[ranks, 2, R] int32: everyone's candidates [2, R], contiguous."""
        gathered = candidates.new_empty((1, self._count * candidates.numel()))
        self._all_gather(candidates.view(1, -1), gathered)
        return gathered.view(self._count, *candidates.shape)


@dataclass(frozen=True, slots=True, eq=False)
class SlicedLogits:
    """Logits of R rows, valid until the model's next; ``len`` is R.

    padded: [R, W] float32, this rank's; columns beyond its slice hold anything.
    slices: how the vocabulary is cut; None: this rank has all of it.
    """

    padded: Tensor
    slices: VocabularySlices | None = None

    def __len__(self) -> int:
        return len(self.padded)

    @property
    def own(self) -> Tensor:
        """[R, n], n tokens from ``slices.first_token`` on."""
        return self.padded if self.slices is None else self.padded[:, : self.slices.num_tokens]

    def first(self, count: int) -> SlicedLogits:
        """Those of the first rows."""
        return SlicedLogits(self.padded[:count], self.slices)

    def select(self, rows: Tensor) -> SlicedLogits:
        """A copy of ``rows`` [N] int64."""
        return SlicedLogits(self.padded.index_select(0, rows), self.slices)

    def whole(self) -> Tensor:
        """[R, V], on every rank. All ranks call it, or none does."""
        return self.padded if self.slices is None else self.slices.gather(self.padded)
