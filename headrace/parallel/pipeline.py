"""The pipeline: which layers are whose, and how activations pass from one stage to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.parallel.outbox import Outbox


@dataclass(frozen=True)
class PipelineStage:
    """One of the stages that a model's layers are cut into."""

    index: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """It embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It has the head and samples."""
        return self.index == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Its part of the layers. Where they cannot be shared equally the first stages have one more each, since the
        last one has the head."""
        each, rest = divmod(num_layers, self.num_stages)
        first = self.index * each + min(self.index, rest)
        return range(first, first + each + (1 if self.index < rest else 0))


class PipelineLink:
    """Between a rank and its neighbours in the stages before and after.

    Args:
        previous, following: their ranks among all; None at the ends.
        enter_wait, leave_wait: called around waiting for the stage before.
    """

    def __init__(
        self,
        previous: int | None,
        following: int | None,
        enter_wait: Callable[[], None],
        leave_wait: Callable[[], None],
    ) -> None:
        self._previous = previous
        self._following = following
        self._enter_wait = enter_wait
        self._leave_wait = leave_wait
        self._outbox = Outbox()

    def receive(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Fill contiguous tensors with what the stage before sends. Nothing on the first stage."""
        if self._previous is None:
            return
        self._enter_wait()
        for tensor in tensors:
            dist.recv(tensor, self._previous)
        self._leave_wait()

    def send(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Queue copies for the next stage, so that this one can go on with other requests. Nothing on the last one."""
        if self._following is None:
            return
        for tensor in tensors:
            self._outbox.send(tensor.clone(), self._following)
