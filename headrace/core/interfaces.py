"""What the control plane expects of others. Implementations are injected by the engine; fakes serve the tests."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from headrace.core.request import FinishReason, Request
from headrace.errors import GrammarError
from headrace.structured_outputs import Constraint

if TYPE_CHECKING:
    from headrace.core.lifecycle import Lifecycle
    from headrace.core.token_mask import TokenMask


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

    def sample_tokens(self, mask: TokenMask | None) -> Future[ModelRunnerOutput]:
        """Sample for the step last given to ``execute_model``; ``mask`` is of its constrained requests, or None."""

    @property
    def is_compiling(self) -> bool:
        """Whether kernels of steps to come are still being compiled: a call may wait for its own, and the results of
        the step before it with it."""

    def take_pages(self, lowest: int, highest: int) -> bool:
        """Have some of the memory early that the next blocks lie in; called between steps, when nothing is to be done.
        No block below ``lowest``, or above ``highest``, is free. False: there is no more to have."""

    def rank_memory_bytes(self) -> list[int]:
        """What each rank held on its device when it was loaded: weights, KV blocks, buffers."""

    def startup_s(self) -> dict[str, float]:
        """Seconds of each stage of the start, of the rank that took longest for it."""

    def update_weights(self, model: str | None) -> None:
        """Replace the model's weights by those of another folder or file of the same model; None: read the same files
        again. No step is outstanding. KV memory stays, and what it holds means nothing any more.

        Raises: EngineDeadError when the old weights are gone and the new ones not there; another HeadraceError when
            nothing was changed.
        """

    def check_alive(self) -> None:
        """Raises EngineDeadError when no step can be run any more."""

    def shutdown(self) -> None:
        """Free the device. Calling twice is allowed."""


class CacheTier(Protocol):
    """Where evicted blocks may go, and come back from: host memory, disk, another replica.

    A tier that takes blocks becomes their owner ("a transfer") until it calls ``KVCacheManager.release_transfer``.
    """

    def on_evict(self, namespace: str, prefix: bytes, block_ids: list[int]) -> bool:
        """Blocks (one per KV group, -1 where absent) of the last block of ``prefix`` (uint32 tokens) leave the tree.
        True: the tier owns them until it releases them. False: they are freed."""

    def match(self, request: Request, num_cached_tokens: int) -> tuple[int, bool]:
        """(further tokens that the tier can bring after ``num_cached_tokens``, is the load asynchronous)."""

    def start_load(self, request: Request, first_token: int, num_tokens: int) -> None:
        """Begin to fill the request's blocks; ``poll_loaded`` tells when they are ready."""

    def poll_loaded(self) -> list[tuple[str, int]]:
        """[(request id, tokens loaded)] of loads that ended since the last call; 0 tokens is a failed load. Called
        once a step."""


class Transfer(Protocol):
    """A move of blocks that goes on beside the engine's thread; ``is_done`` is set last.

    num_done: blocks moved, counted from the first; fewer than asked for when something failed.
    """

    is_done: bool
    num_done: int
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class LoadItem:
    """A block to load into device block ``block`` by way of a host slot, which a file fills first if ``is_on_disk``."""

    key: bytes
    slot: int
    block: int
    is_on_disk: bool


class DiskBlocks(Protocol):
    """Blocks in files, by key."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def read(self, key: bytes, out: memoryview) -> bool:
        """Fill ``out`` with a block; False if the file cannot be used."""

    def write(self, key: bytes, payload: memoryview) -> Transfer | None:
        """Begin to write a block, whose bytes must stay until it is done; None if it is not written."""

    def doubt(self, keys: Iterable[bytes]) -> None:
        """Files of these may be damaged: a write of one is not left out because there is a file."""

    def tend(self) -> None:
        """Do now and then what is due, beside the caller; called every step, and every second without any."""

    def clear(self) -> None:
        """Remove all files."""

    def num_bytes(self) -> int:
        """Of all files that count towards the bound, other models' included, as far as it is known."""

    def files_left(self) -> tuple[int, str] | None:
        """(files that the last ``clear`` could not remove, why); None while it goes on. The next start finds them."""

    def shutdown(self) -> None:
        """Write what waits, then stop."""


class HostBlocks(Protocol):
    """Slots of host memory, each holding one block, and the copies between them and the device.

    slot_bytes: of one block in its slot, which may be in another form than on the device.
    """

    num_slots: int
    slot_bytes: int

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot."""

    def store(self, block: int, slot: int) -> Transfer:
        """Begin to copy a device block into a slot; perhaps done on return."""

    def load(self, items: list[LoadItem], files: DiskBlocks | None) -> Transfer:
        """Begin to copy slots into device blocks, those on disk read first; it ends at the first that fails."""

    def shutdown(self) -> None:
        """Wait for the copies under way."""


class Advance(NamedTuple):
    """Where a request's constraint stands after committed tokens.

    forced: tokens that must come next and may be committed at once; possibly none.
    is_complete: the text is whole and nothing can follow: the request is to end.
    violation: why the answer must end with an error, or None: the tokens broke the constraint, which cannot happen
        while masks are applied; or, as a GrammarError, the constraint is too complex to be followed any further.
    """

    forced: list[int] = []
    is_complete: bool = False
    violation: str | GrammarError | None = None


@dataclass(frozen=True, slots=True)
class ChoiceScene:
    """What a ``TokenChooser`` may act on: the requests, the step that will come next, the seats, the time."""

    lifecycle: Lifecycle
    next_step_id: int
    max_num_seqs: int
    now: float


class TokenChooser(Protocol):
    """Decides the next tokens of a co-schedule group on the host, from log-probabilities of one step.

    Its requests do not run ahead, and what the device samples for them does not count.
    """

    def take(self, request: Request, entry: TokenLogprobs) -> None:
        """Log-probabilities of the token after a request of the group."""

    def decide(self, scene: ChoiceScene) -> list[EngineCoreOutput]:
        """All requests of the group have been taken: give them their tokens, fork and end some; the news."""

    def end(
        self, lifecycle: Lifecycle, reason: FinishReason, message: str | None = None
    ) -> list[EngineCoreOutput]:
        """End all requests of the group (cancelled, or one failed); the last news, none if it was over already."""


class MaskSource(Protocol):
    """Gives the token masks of constrained requests between a step's two calls, and follows committed tokens.

    Called by the engine's thread. Requests that were never started with it are not its business.
    """

    @property
    def is_idle(self) -> bool:
        """Whether no request is constrained, so that committed tokens need not be told."""

    def start(self, request: Request, constraint: Constraint) -> None:
        """Begin to prepare a new request's constraint; nothing here waits."""

    def is_ready(self, request: Request) -> bool:
        """True once the request may be scheduled."""

    def take_ready(self) -> list[tuple[Request, Advance]]:
        """Requests whose constraint has become ready since the last call, each with how it begins."""

    def take_failures(self) -> list[tuple[Request, GrammarError]]:
        """Requests whose constraint cannot be prepared, each once."""

    def wait_prepared(self) -> None:
        """Nothing else can run: wait a moment for a constraint that is being prepared."""

    def awaits_results(self, scheduler_output: SchedulerOutput) -> bool:
        """True while a mask of this step depends on a token that an earlier step in flight samples."""

    def fill(self, scheduler_output: SchedulerOutput) -> TokenMask | None:
        """The masks for ``Executor.sample_tokens``, or None when no request of the step is constrained."""

    def accept(self, request: Request, token_ids: list[int]) -> Advance | None:
        """Advance over tokens just committed; None for a request that is not constrained."""

    def expect(self, request: Request, token_id: int) -> None:
        """``token_id`` is committed already, and the step in flight must sample it."""

    def prefetch(self) -> None:
        """All committed tokens are in: the masks that follow may be computed while the next forward runs."""

    def release(self, request: Request) -> None:
        """The request has finished; forget it."""

    def shutdown(self) -> None:
        """End its threads."""
