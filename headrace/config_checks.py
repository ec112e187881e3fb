"""Values that settings may have, and settings that go together with nothing: refused before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config import EngineConfig, SharingConfig

_RANGES: dict[str, tuple[float, float]] = {
    "seed": (-(1 << 63), (1 << 63) - 1),
    "max_model_len": (2, 1 << 24),
    "block_size": (1, 1024),
    "kv_cache_bytes": (1, 1 << 50),
    "num_kv_blocks": (1, 1 << 30),
    "gpu_memory_utilization": (0.01, 1.0),
    "min_copy_tokens": (1, 1 << 20),
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_stall_ms": (1.0, math.inf),
    "max_prefill_chunk": (1, 1 << 20),
    "max_steps_outstanding": (1, 64),
    "stream_interval": (1, 1024),
    "max_waiting_requests": (1, 1 << 30),
    "cascade_min_tokens": (1, 1 << 24),
    "cascade_min_requests": (2, 65536),
    "cascade_min_share": (0.0, 1.0),
    "max_prefix_length": (1, 1 << 24),
    "host_cache_bytes": (0, 1 << 50),
    "disk_cache_bytes": (1, 1 << 60),
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 1024),
    "rank_timeout_s": (0.5, 1e6),
    "rank_load_timeout_s": (1.0, 1e6),
    "threads": (1, 4096),
    "max_graph_tokens": (0, 2048),
    "max_grammar_compile_s": (0.01, 3600.0),
}

_SIZE = re.compile(r"(-?[0-9]{1,20})\s*(KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SHOWN_CHARS = 80


def is_size(name: str) -> bool:
    """Whether a setting is a number of bytes, which may be written with a unit."""
    return name.endswith("_bytes")


def size_in_bytes(name: str, text: str) -> int:
    """Bytes of "4294967296", "4096 MiB" or "4GiB". Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{name} must be a whole number of bytes, or of KiB, MiB, GiB or TiB, as 4294967296 or 4GiB; "
            f"got {text[:_SHOWN_CHARS]!r}"
        )
    return int(match[1]) * _UNITS[(match[2] or "").lower()]


def verify(config: EngineConfig, owners: Mapping[str, str]) -> None:
    """Check a whole configuration.

    Args:
        owners: {option: section that owns it}.

    Raises: ConfigError.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(getattr(config, owners[name]), name)
        if value is not None and not low <= value <= high:
            reason = (
                "; it holds one prompt token and one answer token at least" if name == "max_model_len" else ""
            )
            nearest = low if value < low else high
            raise ConfigError(
                f"{name} must be in [{low}, {high}]; got {_spell_number(value)}{reason}; the nearest is {nearest}"
            )
    size = config.cache.block_size
    if size & (size - 1):
        raise ConfigError(
            f"block_size must be a power of two; got {size}: try {1 << (size.bit_length() - 1)}"
        )
    scheduler = config.scheduler
    if scheduler.max_step_tokens < scheduler.max_seats:
        raise ConfigError(
            f"max_num_batched_tokens ({scheduler.max_step_tokens}) must be at least max_num_seqs "
            f"({scheduler.max_seats}), or some running request could never advance; lower max_num_seqs"
        )
    longest = config.sharing.max_prefix_length
    if longest is not None and longest < size:
        raise ConfigError(
            f"max_prefix_length is {longest}, less than a block of {size} tokens, and whole blocks are read together: "
            "raise it, or set cascade to 'off'"
        )
    _verify_tiers(config)


def check_tier_layers(sharing: SharingConfig, windows: Iterable[int | None]) -> None:
    """Refuse cache tiers for a model that lets go of tokens.

    Args:
        windows: tokens that each layer, or group of layers, looks back; None for all of them.

    Raises: ConfigError.
    """
    if sharing.host_cache_bytes and any(window is not None for window in windows):
        raise ConfigError(
            "host_cache_bytes: cache tiers hold models whose layers all keep every token; this one has sliding layers: "
            "leave host_cache_bytes out"
        )


def _verify_tiers(config: EngineConfig) -> None:
    sharing = config.sharing
    if sharing.disk_cache_path is not None:
        _verify_folder(sharing.disk_cache_path)
    if not sharing.host_cache_bytes:
        _verify_no_tiers(config)
        return
    if sharing.disk_cache_path is None and sharing.disk_cache_bytes != type(sharing).disk_cache_bytes:
        raise ConfigError(
            f"disk_cache_bytes is {sharing.disk_cache_bytes}, but there is no folder for files; set disk_cache_path, "
            "or leave disk_cache_bytes out"
        )
    if config.parallel.world_size > 1:
        raise ConfigError(
            f"host_cache_bytes: cache tiers need one device, and the parallel sizes ask for "
            f"{config.parallel.world_size}; set them to 1 or leave host_cache_bytes out"
        )
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            "host_cache_bytes: cache tiers hold what prefix caching finds again, and enable_prefix_caching is off; "
            "turn it on or leave host_cache_bytes out"
        )


def _verify_no_tiers(config: EngineConfig) -> None:
    """Refuse settings of tiers where there is none."""
    sharing = config.sharing
    if sharing.disk_cache_path is not None:
        raise ConfigError(
            "disk_cache_path needs host memory to write from; set host_cache_bytes, say to 1 GiB"
        )
    for name in ("disk_cache_bytes", "tier_cache_dtype"):
        value = getattr(sharing, name)
        if value != getattr(type(sharing), name):
            raise ConfigError(
                f"{name} is {value!r}, but there is no cache tier; set host_cache_bytes, or leave {name} out"
            )


def _verify_folder(path: str) -> None:
    if not path.strip() or "\0" in path:
        raise ConfigError(
            f"disk_cache_path is {path!r}, which names no folder; give one, such as ~/.cache/headrace-kv, or leave it "
            "out"
        )
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"disk_cache_path is {path!r}, and there is no home folder of that user; give the whole path"
        ) from None


def _spell_number(value: float) -> str:
    """For a message; whole numbers of thousands of digits have no text."""
    is_huge = isinstance(value, int) and value.bit_length() > 256
    return f"a number of {int(value).bit_length()} bits" if is_huge else str(value)
