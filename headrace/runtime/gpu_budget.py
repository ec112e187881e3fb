"""GpuBudget: what an engine may use of a GPU for KV blocks, and the one setting to change where that is too little."""

from __future__ import annotations

import math
from dataclasses import dataclass

_RESERVE = 0.02
"""Of a GPU's memory: left to the driver and to what others ask for next, where others leave less than our share."""
_MOST = 1.0 - _RESERVE
_MUCH = 0.05
"""Of it: others that hold so much are worth ending."""


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Bytes, of one GPU. ``gpu_memory_utilization`` is one engine's share, as vLLM has it: what was held there before
    the engine began, by others or by the driver, does not count against it, but is not there to be had.

    total_bytes: the GPU's memory.
    start_bytes, free_bytes: not held by anybody, before the engine took anything and now that its weights are there.
    step_bytes: what the largest step holds beside.  graph_bytes: set apart for CUDA graphs.
    utilization: ``gpu_memory_utilization``.
    """

    total_bytes: int
    start_bytes: int
    free_bytes: int
    step_bytes: int
    graph_bytes: int
    utilization: float

    @property
    def share_bytes(self) -> int:
        """For KV blocks by the engine's share."""
        return round(self.total_bytes * self.utilization) - self._needed_bytes

    @property
    def room_bytes(self) -> int:
        """For KV blocks by what others leave."""
        beside = self.step_bytes + self.graph_bytes + int(_RESERVE * self.total_bytes)
        return self.free_bytes - beside

    @property
    def num_bytes(self) -> int:
        """For KV blocks; not positive where there is nothing left."""
        return min(self.share_bytes, self.room_bytes)

    @property
    def others_bytes(self) -> int:
        """Held when the engine began."""
        return self.total_bytes - self.start_bytes

    @property
    def _needed_bytes(self) -> int:
        """What the engine holds, and will hold beside KV blocks."""
        return max(0, self.start_bytes - self.free_bytes) + self.step_bytes + self.graph_bytes

    def fix(self, kv_bytes: int, num_fitting: int) -> str:
        """The one setting that helps where ``kv_bytes``, of one request, do not fit but ``num_fitting`` tokens do."""
        wanted = math.ceil(100 * (self._needed_bytes + kv_bytes) / self.total_bytes) / 100
        if self.utilization < wanted <= _MOST and kv_bytes <= self.room_bytes:
            return f"set gpu_memory_utilization to {wanted:.2f} (it is {self.utilization:g})"
        if num_fitting > 0:
            return f"set max_model_len to {num_fitting} or less"
        if self.others_bytes > _MUCH * self.total_bytes:
            return f"end what else holds {self.others_bytes / 2**30:.2f} GiB there"
        return "set tensor_parallel_size higher, so that each device holds fewer of the weights"
