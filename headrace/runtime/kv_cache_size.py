"""How many KV blocks to hold: what was asked for, or what memory allows, and never less than one whole request."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.config import CacheConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import NewRequest, SchedulerOutput
from headrace.errors import ConfigError
from headrace.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

CPU_DEFAULT_BYTES = 2 << 30
CPU_DEFAULT_SHARE = 0.2
CPU_MAX_SHARE = 0.5
"""Of the memory to be had now: the default takes the smaller of the first two, more only for one whole request."""


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The longest request, and what it holds.

    specs: the model's KV groups.
    block_size: tokens in a block.
    max_model_len: its tokens.
    max_uncommitted_tokens: tokens in flight at a time, which a sliding group holds beside its window.
    """

    specs: Sequence[KVCacheSpec]
    block_size: int
    max_model_len: int
    max_uncommitted_tokens: int

    def blocks(self, num_tokens: int) -> int:
        """Blocks, over all groups, that a request of this many tokens holds at most."""
        whole = -(-num_tokens // self.block_size)
        total = 0
        for spec in self.specs:
            if spec.window is None:
                total += whole
            else:
                in_window = spec.window - 2 + self.max_uncommitted_tokens
                total += min(whole, -(-in_window // self.block_size) + 1)
        return total

    def tokens_in(self, num_blocks: int) -> int:
        """The longest request, up to max_model_len, that fits into this many blocks."""
        lengths = range(1, self.max_model_len + 1)
        return bisect.bisect_right(lengths, num_blocks, key=self.blocks)

    @property
    def bytes_per_block(self) -> int:
        """Of every group."""
        return self.specs[0].bytes_per_block


def cpu_budget_bytes(available_bytes: int, one_request_bytes: int) -> int:
    """Bytes for KV blocks on a CPU when nothing was asked for."""
    default = min(CPU_DEFAULT_BYTES, int(CPU_DEFAULT_SHARE * available_bytes))
    return max(default, min(one_request_bytes, int(CPU_MAX_SHARE * available_bytes)))


def num_kv_blocks(
    cache: CacheConfig,
    size: RequestSize,
    budget_bytes: int,
    budget_source: str,
    advice: Callable[[int, int], str] | None = None,
) -> int:
    """Blocks to allocate.

    Args:
        cache: ``num_kv_blocks`` is taken as it is; ``kv_cache_bytes`` takes the place of the budget.
        budget_bytes: what the device has for KV blocks.
        budget_source: where the budget comes from, for the error: "free memory" or "gpu_memory_utilization".
        advice: what to do when the budget is too small, by the bytes of one request and the tokens that fit.

    Raises:
        ConfigError: not even one request of ``max_model_len`` tokens fits; the message says how many tokens do.
    """
    needed = size.blocks(size.max_model_len)
    if cache.num_kv_blocks is not None:
        if cache.num_kv_blocks < needed:
            logger.warning(
                "num_kv_blocks=%d holds %d tokens of one request, fewer than max_model_len=%d: longer ones are refused",
                cache.num_kv_blocks,
                size.tokens_in(cache.num_kv_blocks),
                size.max_model_len,
            )
        return cache.num_kv_blocks
    given = cache.kv_cache_bytes
    total_bytes = budget_bytes if given is None else given
    count = max(0, total_bytes) // size.bytes_per_block
    if count < needed:
        fits = size.tokens_in(count)
        source = budget_source if given is None else "kv_cache_bytes"
        setting = "kv_cache_bytes" if source == "free memory" else source
        shorter = f"max_model_len to {fits} or less" if fits else "max_model_len lower"
        fix = f"set {shorter}, or raise {setting}"
        if advice is not None and given is None:
            fix = advice(needed * size.bytes_per_block, fits)
        raise ConfigError(
            f"{_mebibytes(max(0, total_bytes))} for KV blocks ({source}) hold {fits} tokens of one request, but "
            f"max_model_len is {size.max_model_len}, which needs {_mebibytes(needed * size.bytes_per_block)}; {fix}"
        )
    return count


def largest_step(num_tokens: int, num_blocks: int, num_groups: int) -> SchedulerOutput:
    """One request that computes a whole step's tokens and samples: greedily, which compiles the fewest kernels."""
    blocks = [list(range(group * num_blocks, (group + 1) * num_blocks)) for group in range(num_groups)]
    new = NewRequest("profile", [0] * num_tokens, num_tokens, blocks, SamplingParams(temperature=0.0), 0)
    return SchedulerOutput(0, ["profile"], [0], [num_tokens], [0], [new])


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
