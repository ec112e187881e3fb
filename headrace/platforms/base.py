"""Platform: what the engine asks of the machine it computes on. All calls to torch.cuda live behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What models are computed in, by its name."""


class DeviceEvent(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None:
        """Marks the work queued so far on the current stream."""

    def is_done(self) -> bool:
        """Whether all work before the mark has completed."""

    def wait(self) -> None:
        """Blocks the host until all work before the mark has completed."""

    def elapsed_ms(self, end: DeviceEvent) -> float:
        """Milliseconds between this mark and ``end``, both completed."""


class CopyStream(Protocol):
    """A queue of the device beside the one that computes."""

    def use(self) -> AbstractContextManager[object]:
        """Within it, the thread's copies go into this queue."""

    def wait(self) -> None:
        """Block the host until the queue is empty."""


class Platform(Protocol):
    """One device.

    Attributes:
        name: "cpu" or "cuda".
        device: where tensors go.
    """

    name: str
    device: torch.device

    def describe(self) -> str:
        """The device in a few words, for logs."""

    def total_memory_bytes(self) -> int:
        """Memory that this process could ever have on the device; limits of a container count."""

    def available_memory_bytes(self) -> int:
        """Memory that can be had now, without taking it from others."""

    def used_memory_bytes(self) -> int:
        """Memory that this process holds on the device now."""

    def peak_memory_bytes(self) -> int:
        """The most that this process has held on the device since the start or the last reset."""

    def reset_peak_memory(self) -> None:
        """Starts a new peak, where the system can forget the old one."""

    def default_num_threads(self) -> int:
        """Compute threads to use on the host: the physical cores that this process may keep busy."""

    def resolve_dtype(self, requested: DTypeName, checkpoint_dtype: str | None) -> torch.dtype:
        """The compute dtype.

        Args:
            requested: the user's word; "auto" lets the device choose what it computes fast and right.
            checkpoint_dtype: what the weights are stored in ("bfloat16"), or None for a mix, as in GGUF files.

        Raises:
            ConfigError: the device cannot compute the requested type.
        """

    def synchronize(self) -> None:
        """Blocks until the device has done all queued work."""

    def new_event(self) -> DeviceEvent:
        """An event, not yet recorded."""

    def new_copy_stream(self) -> CopyStream | None:
        """A queue for copies beside the one that computes; None where copies are the host's own work."""


def device_type(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """What "auto" comes to here, without touching the device. Raises ConfigError if "cuda" cannot be had."""
    from headrace.platforms.cuda import check_cuda, is_cuda_usable

    if device == "cuda":
        check_cuda()
    return "cuda" if device == "cuda" or (device == "auto" and is_cuda_usable()) else "cpu"


def current_platform(device: Literal["auto", "cpu", "cuda"] = "auto", local_rank: int = 0) -> Platform:
    """The platform for a device name; "auto" is CUDA where a GPU can be used, else the CPU.

    Args:
        device: the user's word.
        local_rank: which of the host's GPUs.

    Raises:
        ConfigError: CUDA is asked for and absent, or has fewer GPUs than ``local_rank`` needs.
    """
    from headrace.platforms.cpu import CPUPlatform
    from headrace.platforms.cuda import CUDAPlatform

    if device_type(device) == "cuda":
        return CUDAPlatform(local_rank)
    return CPUPlatform()
