"""TokenLink: sampled tokens from the last stage of a pipeline straight to the first, which embeds them.

They go from host to host over gloo, also where ranks compute on GPUs: a few hundred numbers, whose way must not queue
behind activations. The engine is not on the way, so that its work hides behind steps that are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headrace.parallel.outbox import Outbox


@dataclass(frozen=True, slots=True, eq=False)
class ComingTokens:
    """Tokens of one step that are on their way."""

    work: Any
    buffer: torch.Tensor
    enter_wait: Callable[[], None]
    leave_wait: Callable[[], None]

    def wait(self) -> torch.Tensor:
        """They, [S] int32 on the host. Once only."""
        self.enter_wait()
        self.work.wait()
        self.leave_wait()
        return self.buffer


class TokenLink:
    """The end of one rank. Steps' tokens are expected in the order in which they are sent.

    Args:
        group: a gloo group that both ends belong to.
        source: the rank that sends; targets: those that get them.
        enter_wait, leave_wait: called around waiting for tokens.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        targets: Sequence[int],
        enter_wait: Callable[[], None],
        leave_wait: Callable[[], None],
    ) -> None:
        self._group = group
        self._source = source
        self._targets = list(targets)
        self._enter_wait = enter_wait
        self._leave_wait = leave_wait
        self._outbox = Outbox(group)

    def send(self, token_ids: torch.Tensor) -> None:
        """At the source, by one thread: a step's tokens [S], at least one, on the host. Does not wait."""
        copy = token_ids.to(torch.int32, copy=True)
        for target in self._targets:
            self._outbox.send(copy, target)

    def expect(self, count: int) -> ComingTokens:
        """At a target: the next step's tokens, which are ``count``, at least one. Does not wait."""
        buffer = torch.empty(count, dtype=torch.int32, device="cpu")
        work = dist.irecv(buffer, self._source, group=self._group)
        return ComingTokens(work, buffer, self._enter_wait, self._leave_wait)
