"""StackConfig: what the decode stack's kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, field

import triton

from headrace.kernels.triton.source_digest import digest_of


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What the kernel is compiled for."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    is_silu: bool
    has_qk_norm: bool
    has_bias: bool
    block_m: int
    block_keys: int
    max_splits: int
    sources: str = field(default=digest_of(__file__), kw_only=True)

    @property
    def block_hidden(self) -> int:
        """Hidden size rounded up to a power of two."""
        return int(triton.next_power_of_2(self.hidden))

    @property
    def block_splits(self) -> int:
        """Splits rounded up to a power of two."""
        return int(triton.next_power_of_2(self.max_splits))

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_group(self) -> int:
        """Query heads of one KV head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.group))

    @property
    def half(self) -> int:
        """Half a head."""
        return self.head_dim // 2

    @property
    def head_stride(self) -> int:
        """Elements from one KV head of a block to the next."""
        return self.block_size * self.head_dim
