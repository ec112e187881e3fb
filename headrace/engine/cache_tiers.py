"""Puts the cache tiers together that the configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from headrace.config import SharingConfig
from headrace.config_checks import check_tier_layers
from headrace.core.cache_tiers import TieredCache
from headrace.core.cost_model import CostModel, StepFeatures
from headrace.core.interfaces import Executor, HostBlocks
from headrace.kv_transfer.disk_store import DiskStore


class TierExecutor(Protocol):
    """An executor whose device blocks can be copied beside its steps."""

    def open_host_memory(self, num_bytes: int, dtype: str) -> HostBlocks:
        """So much host memory for blocks in a form (``tier_cache_dtype``). Raises ConfigError when it cannot be had."""

    def cache_fingerprint(self, dtype: str) -> bytes:
        """16 bytes that tell apart what the bytes of a block mean in that form."""


def make_tiers(
    sharing: SharingConfig, executor: Executor, block_size: int, cost_model: CostModel
) -> TieredCache | None:
    """The tiers below the device's cache, or None when none is asked for.

    Raises: ConfigError when the model cannot have them.
    """
    if not sharing.host_cache_bytes:
        return None
    check_tier_layers(sharing, [spec.window for spec in executor.kv_cache_specs()])
    able = cast(TierExecutor, executor)
    host = able.open_host_memory(sharing.host_cache_bytes, sharing.tier_cache_dtype)

    def open_disk() -> DiskStore:
        assert sharing.disk_cache_path is not None
        return DiskStore(
            Path(sharing.disk_cache_path).expanduser(),
            able.cache_fingerprint(sharing.tier_cache_dtype),
            host.slot_bytes,
            sharing.disk_cache_bytes,
        )

    disk = None if sharing.disk_cache_path is None else open_disk()

    def recompute_ms(start: int, num_tokens: int) -> float:
        if not cost_model.knows_prompts:  # loading is the better guess
            return 0.0
        features = StepFeatures()
        features.add(start, num_tokens, samples=False)
        return cost_model.predict_ms(features)

    return TieredCache(host, disk, block_size, recompute_ms, reopen_disk=open_disk)
