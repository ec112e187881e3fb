"""CascadeFloor: what reading a shared span together must spare before it can pay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CascadeFloor:
    """How much a span must spare, in KV tokens of one layer, to pay for what cascade adds to a step's attention.

    tokens: for the launches and tiles that come with any span.
    tokens_per_request: for each request of the group, whose rows are gathered and merged.
    tokens_per_own_token: for each token of the group's contexts after the span, which the requests read for themselves:
        the longer these are beside the span, the less is won.

    The numbers belong to a device (``engine.device_defaults.cascade_floor``).
    """

    tokens: float
    tokens_per_request: float = 0.0
    tokens_per_own_token: float = 0.0

    def is_reached(self, num_tokens: int, num_requests: int, num_own_tokens: int) -> bool:
        """True if a span of ``num_tokens``, read by ``num_requests`` together, spares enough.

        num_own_tokens: sum over the requests of their context after the span's end.
        """
        needed = (
            self.tokens + self.tokens_per_request * num_requests + self.tokens_per_own_token * num_own_tokens
        )
        return num_tokens * (num_requests - 1) >= needed


DEFAULT_FLOOR = CascadeFloor(8192.0)
"""Of devices without a measured one: so many spared tokens pay for gathering and merging a span's rows."""
