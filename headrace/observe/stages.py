"""Stages: how long each part of something took, such as an engine's start."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds by name, in the order in which stages began."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Count what is inside towards the stage ``name``, also when it fails."""
        start = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def describe(self) -> str:
        """ "weights 2.1 s, kernels 0.8 s"."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
