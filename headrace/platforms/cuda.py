"""CUDAPlatform: one NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from headrace.errors import ConfigError
from headrace.platforms.base import DTYPES, CopyStream, DeviceEvent, DTypeName
from headrace.platforms.host_limits import HostLimits

_MIN_BF16_CAPABILITY = (8, 0)


def is_cuda_usable() -> bool:
    """Whether torch has CUDA and sees a GPU."""
    return torch.cuda.is_available()


def check_cuda() -> None:
    """Raises ConfigError, with the reason, where CUDA was asked for and cannot be used."""
    if not is_cuda_usable():
        raise ConfigError(
            f"device='cuda' was asked for, but {_why_no_cuda()}; use device='cpu', or 'auto' to take what is there"
        )


def gpu_memory_bytes() -> int:
    """Memory of this host's first GPU, without making a context on it."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def use_gpu(device: torch.device) -> None:
    """In a thread of its own: launch on this GPU, not the first."""
    torch.cuda.set_device(device)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """The GPU's, (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


@contextmanager
def launching_on(device: torch.device, stream: torch.Stream) -> Iterator[None]:
    """This thread launches on that stream of the GPU."""
    assert isinstance(stream, torch.cuda.Stream)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def current_stream(device: torch.device) -> torch.Stream:
    """The stream of the GPU that this thread launches on."""
    return torch.cuda.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Another stream of the GPU."""
    return torch.cuda.Stream(device)


class CUDAPlatform:
    """GPU number ``local_rank`` of this host; becomes the process's current device.

    Raises:
        ConfigError: torch has no CUDA, or there is no such GPU.
    """

    name = "cuda"

    def __init__(self, local_rank: int = 0) -> None:
        check_cuda()
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ConfigError(
                f"GPU number {local_rank} was asked for, but this host has {num_gpus} (numbers 0 to {num_gpus - 1}); "
                "lower tensor_parallel_size or show more GPUs to the process"
            )
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)
        self._capability = torch.cuda.get_device_capability(self.device)

    def describe(self) -> str:
        """The GPU's own name and its memory."""
        return f"{torch.cuda.get_device_name(self.device)} ({self.total_memory_bytes() / 2**30:.1f} GiB)"

    def total_memory_bytes(self) -> int:
        """The GPU's memory."""
        return torch.cuda.mem_get_info(self.device)[1]

    def available_memory_bytes(self) -> int:
        """Free memory, and what torch's allocator holds without using it."""
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def used_memory_bytes(self) -> int:
        """Memory of this process's tensors."""
        return torch.cuda.memory_allocated(self.device)

    def peak_memory_bytes(self) -> int:
        """Highest memory of this process's tensors since the last reset."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak_memory(self) -> None:
        """The peak becomes what is held now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def default_num_threads(self) -> int:
        """Physical cores of the host within affinity and quota, for what is left to it."""
        return HostLimits().num_physical_cores()

    def resolve_dtype(self, requested: DTypeName, checkpoint_dtype: str | None) -> torch.dtype:
        """For "auto": the checkpoint's type, bf16 for a mix; fp16 instead of bf16 on GPUs before Ampere."""
        has_bf16 = self._capability >= _MIN_BF16_CAPABILITY
        if requested == "bfloat16" and not has_bf16:
            raise ConfigError(
                f"dtype='bfloat16' needs compute capability {_version(_MIN_BF16_CAPABILITY)}, but "
                f"{self.describe()} has {_version(self._capability)}; use dtype='float16'"
            )
        if requested != "auto":
            return DTYPES[requested]
        if checkpoint_dtype in ("float32", "float16"):
            return DTYPES[checkpoint_dtype]
        return torch.bfloat16 if has_bf16 else torch.float16

    def synchronize(self) -> None:
        """Waits for all streams of the GPU."""
        torch.cuda.synchronize(self.device)

    def new_event(self) -> DeviceEvent:
        """A CUDA event that keeps the time."""
        return _CUDAEvent()

    def new_copy_stream(self) -> CopyStream:
        """A CUDA stream."""
        return _CUDACopyStream(self.device)


def graph_ms(call: Callable[[], None], num_calls: int = 20, num_replays: int = 5) -> float:
    """Milliseconds of one ``call`` on the current device when it runs many times in a CUDA graph: without the host."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(num_calls):
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / (num_calls * num_replays)


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    return "no NVIDIA GPU is visible"


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


class _CUDACopyStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


class _CUDAEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def elapsed_ms(self, end: DeviceEvent) -> float:
        assert isinstance(end, _CUDAEvent)
        return self._event.elapsed_time(end._event)
