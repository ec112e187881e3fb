"""ParallelState: which slice of every layer this rank owns, and how ranks add their parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from headrace.errors import ConfigError


class Communicator(Protocol):
    """Collectives over the ranks of one tensor-parallel group."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """x = sum of all ranks' x, in place."""

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [.., size * n] = all ranks' x [.., n] side by side in the last dimension."""


class SoloCommunicator:
    """A group of one rank: nothing to exchange."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """The sum of one."""

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """A copy, unless it is the same memory."""
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)


@dataclass(frozen=True)
class ParallelState:
    """Rank and size of the tensor-parallel group.

    keeps_slices: each rank's logits stay its slice of the vocabulary until somebody reads whole rows; else they are
        gathered at once.
    """

    rank: int = 0
    size: int = 1
    communicator: Communicator = field(default_factory=SoloCommunicator)
    keeps_slices: bool = True

    def share(self, total: int, what: str) -> slice:
        """This rank's equal part of ``total`` things. Raises ConfigError if they cannot be cut equally."""
        if total % self.size:
            sizes = [size for size in range(1, total + 1) if total % size == 0]
            raise ConfigError(
                f"tensor_parallel_size {self.size} does not divide {total} {what}; possible sizes: {sizes}"
            )
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def kv_share(self, num_kv_heads: int) -> slice:
        """This rank's KV heads; with more ranks than heads, neighbours hold copies of one."""
        if num_kv_heads >= self.size:
            return self.share(num_kv_heads, "KV heads")
        if self.size % num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size {self.size} must be a multiple or a divisor of {num_kv_heads} KV heads"
            )
        head = self.rank * num_kv_heads // self.size
        return slice(head, head + 1)
