"""MemoryLedger: what a device's memory was planned for and what it came to; being out of memory is answered with it."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Literal

import torch

from headrace.config import CacheConfig
from headrace.errors import DeviceMemoryError, HeadraceError
from headrace.platforms.base import Platform

Use = Literal["weights", "KV blocks", "graphs", "activations"]
USES: tuple[Use, ...] = ("weights", "KV blocks", "graphs", "activations")

_LEAST_STEP = 0.02
"""``gpu_memory_utilization`` is lowered by so much at least: one allocation that failed is seldom the last."""
_WORDS = ("out of memory", "can't allocate memory", "cuda_error_out_of_memory")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB)")


class MemoryLedger:
    """Bytes by use, planned and actual, of one rank's device.

    Args:
        platform: the device.
        cache: says how its memory is shared out.

    Attributes:
        planned, actual: bytes by use. Activations come last: what was held at most beside the rest.
    """

    def __init__(self, platform: Platform, cache: CacheConfig) -> None:
        self._platform = platform
        self._cache = cache
        self.planned: dict[Use, int] = {}
        self.actual: dict[Use, int] = {}

    @contextlib.contextmanager
    def spending(self, use: Use) -> Iterator[None]:
        """Book what this process holds more at the end. Raises DeviceMemoryError as ``watching`` does."""
        before = self._platform.used_memory_bytes()
        with self.watching(use):
            yield
        self._book(use, self._platform.used_memory_bytes() - before)

    @contextlib.contextmanager
    def spending_of_device(self, use: Use) -> Iterator[None]:
        """Book what the device has less at the end, which counts the driver's own needs (graphs) too."""
        before = self._platform.available_memory_bytes()
        with self.watching(use):
            yield
        self._book(use, before - self._platform.available_memory_bytes())

    @contextlib.contextmanager
    def watching(self, use: Use) -> Iterator[None]:
        """Raises: DeviceMemoryError, with the ledger and the setting that helps, for an error that means that there is
        no memory left while it is wanted for ``use``."""
        try:
            yield
        except HeadraceError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(self.explain(use, error)) from error

    def explain(self, use: Use, error: BaseException | None = None) -> str:
        """Where memory ran out, what holds it, and the one setting that fixes it."""
        wanted = wanted_bytes(error)
        more = f" ({_text(wanted)} more)" if wanted else ""
        return (
            f"{self._platform.describe()} has no memory left for {use}{more}: {self.describe()}; "
            f"{self._fix(use, wanted)}"
        )

    def describe(self) -> str:
        """Each use, planned and actual, and what is held by others."""
        held = self._platform.used_memory_bytes()
        if "KV blocks" in self.actual:
            rest = self._platform.peak_memory_bytes() - sum(
                self.actual.get(use, 0) for use in ("weights", "KV blocks")
            )
            self.actual["activations"] = max(0, rest)
        parts = [
            f"{use} {_text(self.planned.get(use))} planned, {_text(self.actual.get(use))} actual"
            for use in USES
            if use in self.planned or use in self.actual
        ]
        total, free = self._platform.total_memory_bytes(), self._platform.available_memory_bytes()
        others = max(0, total - free - held)
        return (
            f"{', '.join(parts) or 'nothing held yet'}; {_text(free)} of {_text(total)} free, "
            f"{_text(others)} held by others and the driver"
        )

    def _book(self, use: Use, num_bytes: int) -> None:
        self.actual[use] = self.actual.get(use, 0) + max(0, num_bytes)

    def _fix(self, use: Use, wanted: int) -> str:
        """The one setting."""
        total = self._platform.total_memory_bytes()
        if use == "weights":
            weights = max(self.planned.get("weights", 0), self.actual.get("weights", 0) + wanted)
            if weights >= self._cache.gpu_memory_utilization * total:
                return "set tensor_parallel_size higher, so that each device holds fewer of the weights"
            return (
                "the weights alone would fit: end what else holds memory there, or set quantization to int8"
            )
        if self._cache.num_kv_blocks is not None:
            return f"set num_kv_blocks below {self._cache.num_kv_blocks}"
        if self._cache.kv_cache_bytes is not None or self._platform.name == "cpu":
            given = self._cache.kv_cache_bytes or self.planned.get("KV blocks", 0)
            return f"set kv_cache_bytes to {max(1, given - max(wanted, given // 10))}"
        share = self._cache.gpu_memory_utilization
        lower = math.floor(100 * (share - max(_LEAST_STEP, wanted / total))) / 100
        return f"set gpu_memory_utilization to {max(lower, 0.01):.2f} (it is {share:g})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, CUDA, Triton or Python say with it that memory ran out.

    What it came upon counts too: a capture that is broken off by it ends with an error of its own.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def wanted_bytes(error: BaseException | None) -> int:
    """What the failed allocation asked for, where the message says it; else 0."""
    found = _WANTED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _text(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
