"""Histogram: counts in fixed buckets, cheap enough to be filled for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class Histogram:
    """Counts values per bucket; a value belongs to the first bucket whose upper bound is not below it.

    counts: one per bound, and one for what is above the last.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several values."""
        for value in values:
            self.observe(value)

    def cumulative(self) -> list[tuple[str, float]]:
        """[(upper bound, values at or below it)], the last bound "+Inf", as Prometheus wants them."""
        rows, count = [], 0
        for bound, number in zip((*self.bounds, float("inf")), self.counts, strict=True):
            count += number
            rows.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(count)))
        return rows
