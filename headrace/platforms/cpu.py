"""CPUPlatform: the host itself as the device."""

from __future__ import annotations

import time

import torch

from headrace.platforms.base import DTYPES, CopyStream, DeviceEvent, DTypeName
from headrace.platforms.host_limits import HostLimits

# What Linux calls instructions by which bf16 activations pay: AMX, some eight times as fast as fp32. Dot products of
# bf16 (AVX-512, Arm) are not: bf16 weights are read as they are by fp32 kernels, too, which are exact.
_BF16_FLAGS = frozenset({"amx_bf16"})


class CPUPlatform:
    """The CPU. Work is done when a call returns, so events only keep the time."""

    name = "cpu"

    def __init__(self, limits: HostLimits | None = None) -> None:
        self.device = torch.device("cpu")
        self._limits = limits or HostLimits()

    def describe(self) -> str:
        """Cores, memory, and whether bf16 is fast."""
        bf16 = "fast bf16" if self._has_fast_bf16() else "no fast bf16"
        return (
            f"cpu ({self.default_num_threads()} cores, {self.total_memory_bytes() / 2**30:.1f} GiB, {bf16})"
        )

    def total_memory_bytes(self) -> int:
        """RAM, or the container's limit."""
        return self._limits.total_memory_bytes()

    def available_memory_bytes(self) -> int:
        """RAM to be had without swapping, within the container's limit."""
        return self._limits.available_memory_bytes()

    def used_memory_bytes(self) -> int:
        """Resident memory of this process."""
        return self._limits.process_memory_bytes()

    def peak_memory_bytes(self) -> int:
        """Highest resident memory since the process began."""
        return self._limits.process_memory_bytes(peak=True)

    def reset_peak_memory(self) -> None:
        """Does nothing: the kernel keeps one peak for the life of a process."""

    def default_num_threads(self) -> int:
        """Physical cores within affinity and quota; a second thread on a core only slows matrix products."""
        return self._limits.num_physical_cores()

    def resolve_dtype(self, requested: DTypeName, checkpoint_dtype: str | None) -> torch.dtype:
        """For "auto": bf16 if the checkpoint is and this CPU multiplies it fast, else fp32; fp16 only on request."""
        if requested != "auto":
            return DTYPES[requested]
        if checkpoint_dtype == "bfloat16" and self._has_fast_bf16():
            return torch.bfloat16
        return torch.float32

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def new_event(self) -> DeviceEvent:
        """A clock reading to be taken."""
        return _ClockEvent()

    def new_copy_stream(self) -> CopyStream | None:
        """None: the host copies."""
        return None

    def _has_fast_bf16(self) -> bool:
        return not _BF16_FLAGS.isdisjoint(self._limits.cpu_flags())


class _ClockEvent:
    def __init__(self) -> None:
        self._time_s: float | None = None

    def record(self) -> None:
        self._time_s = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def elapsed_ms(self, end: DeviceEvent) -> float:
        assert isinstance(end, _ClockEvent) and self._time_s is not None and end._time_s is not None
        return (end._time_s - self._time_s) * 1e3
