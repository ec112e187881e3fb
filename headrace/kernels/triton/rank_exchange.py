"""RankExchange: memory through which the decode stacks of a tensor-parallel group add up and wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the kernel is compiled for: how many ranks there are, and which this is."""

    size: int = 1
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RankExchange:
    """One rank's.

    A sum's parts come to lie in one of two places by turns, so that a rank that is ahead does not write over what
    another still reads: it cannot be ahead by two, since every sum begins with all programs of all ranks waiting.

    ranks: who takes part.
    parts: [ranks] int64, addresses of each rank's [2, ranks, hidden_size] numbers of the activations' type.
    arrivals: [ranks] int64, addresses of each rank's int32 counter, zero at first.
    num_programs: of each rank's launches.
    all_agree: whether something is true on every rank, which ask together.
    """

    ranks: Ranks
    parts: torch.Tensor
    arrivals: torch.Tensor
    num_programs: int
    all_agree: Callable[[bool], bool] = bool
