"""What the control plane expects of others. Implementations are injected by the engine; fakes serve the tests."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import ModelRunnerOutput, SchedulerOutput
from headrace.core.request import Request


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


class Executor(Protocol):
    """The data plane, as the engine core drives it: two calls a step, in step order.

    Steps may overlap: the engine may call ``execute_model`` for step s+1 before the future of step s is done. Inputs
    that step s+1 takes from step s's samples stay on the device. Futures complete in step order.
    """

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The model's KV groups; all have the same ``bytes_per_block``."""

    def num_kv_blocks(self) -> int:
        """Blocks that were allocated on the device."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Start the forward of one step."""

    def sample_tokens(self, mask: Any | None) -> Future[ModelRunnerOutput]:
        """Sample for the step last given to ``execute_model``; ``mask`` holds grammar bitmasks, or None."""

    def check_alive(self) -> None:
        """Raises EngineDeadError when no step can be run any more."""

    def shutdown(self) -> None:
        """Free the device. Calling twice is allowed."""


class CacheTier(Protocol):
    """Where evicted blocks may go, and come back from: host memory, disk, another replica.

    A tier that takes blocks becomes their owner ("a transfer") until it calls ``KVCacheManager.release_transfer``.
    """

    def on_evict(self, namespace: str, token_ids: list[int], block_ids: list[int]) -> bool:
        """Blocks (one per KV group, -1 where absent) of the last block of prefix ``token_ids`` leave the tree.
        True: the tier owns them until it releases them. False: they are freed."""

    def match(self, request: Request, num_cached_tokens: int) -> tuple[int, bool]:
        """(further tokens that the tier can bring after ``num_cached_tokens``, is the load asynchronous)."""

    def start_load(self, request: Request, first_token: int, num_tokens: int) -> None:
        """Begin to fill the request's blocks; ``poll_loaded`` tells when they are ready."""

    def poll_loaded(self) -> list[tuple[str, int]]:
        """[(request id, tokens loaded)] of loads that ended since the last call; 0 tokens is a failed load."""


class MaskSource(Protocol):
    """Gives the token masks of constrained requests between a step's two calls, and follows committed tokens."""

    def fill(self, scheduler_output: SchedulerOutput) -> Any | None:
        """The mask for ``Executor.sample_tokens``, or None when no request of the step is constrained."""

    def accept(self, request: Request, token_ids: list[int]) -> None:
        """Advance the request's matcher over tokens just committed."""

    def release(self, request: Request) -> None:
        """The request has finished; forget it."""


class GrammarMatcher(Protocol):
    """One request's constraint. Advances from committed tokens only, in one place (the engine core)."""

    def fill_mask(self, bitmask: Any, row: int) -> None:
        """Write the allowed-token bits (uint32 words) of the next position into ``bitmask[row]``."""

    def accept(self, token_ids: list[int]) -> bool:
        """Advance over committed tokens; False if one of them is not allowed."""

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, possibly none."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    def is_finished(self) -> bool:
        """True if the text may end here."""
