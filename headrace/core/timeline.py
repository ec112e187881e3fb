"""The one clock of a request: every transition stamped with a monotonic time and a cause."""

from __future__ import annotations

import msgspec


class Timeline(msgspec.Struct):
    """Stamps of one request. Latency receipts, metrics and traces read these; nothing else keeps a clock.

    events: (name, monotonic seconds, cause); names are those of ``RequestStatus``.
    token_times: monotonic seconds at which each generated token was committed.
    """

    events: list[tuple[str, float, str]] = msgspec.field(default_factory=list)
    token_times: list[float] = msgspec.field(default_factory=list)
    num_preemptions: int = 0

    def stamp(self, name: str, now: float, cause: str = "") -> None:
        """Record a transition."""
        self.events.append((name, now, cause))

    def first(self, name: str) -> float | None:
        """Time of the first event of that name, or None."""
        return next((time for event, time, _ in self.events if event == name), None)
