"""ModelWidths: the sizes of a model that its kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.quantized_cache import KVFormats, is_coded
from headrace.kernels.triton.decode_stack import is_head_dim_stacked


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Weights kept as integers of so many bits, with a scale, and perhaps a minimum, for each group of columns; None: a
    group is a row."""

    bits: int
    group_columns: int | None
    has_minimums: bool


@dataclass(frozen=True, slots=True)
class ModelWidths:
    """What the kernels of a model depend on, of one rank.

    windows: of its layers, each once; None is full attention.
    has_qk_norm, has_qkv_bias, activation: see the layers.
    kv_type: of stored keys and values; None: ``dtype``.
    num_layers: of this rank's stage, where all of them and the embedding are there; 0: they make no decode stack.
    num_slices: parts of the vocabulary that tokens are picked from; ``vocab_size`` is that of this rank's.
    packed, packed_vocabulary: the form of the layers' linears, and of embedding and head; None: dense.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    dtype: torch.dtype
    has_qk_norm: bool = False
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float | None = None
    activation: str = "silu"
    has_qkv_bias: bool = False
    kv_type: torch.dtype | KVFormats | None = None
    num_layers: int = 0
    num_slices: int = 1
    packed: PackedForm | None = None
    packed_vocabulary: PackedForm | None = None

    @property
    def is_coded(self) -> bool:
        """Whether bf16 queries meet codes of 8 bits."""
        return is_coded(self.dtype, self.kv_type or self.dtype)

    @property
    def qkv(self) -> tuple[int, int]:
        """(outputs, inputs) of the query-key-value product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, self.hidden_size

    @property
    def output(self) -> tuple[int, int]:
        """(outputs, inputs) of the attention's output product."""
        return self.hidden_size, self.num_heads * self.head_dim

    @property
    def gate_up(self) -> tuple[int, int]:
        """(outputs, inputs) of the gate and up products."""
        return 2 * self.intermediate_size, self.hidden_size

    @property
    def down(self) -> tuple[int, int]:
        """(outputs, inputs) of the down product."""
        return self.hidden_size, self.intermediate_size

    @property
    def head(self) -> tuple[int, int]:
        """(outputs, inputs) of the head."""
        return self.vocab_size, self.hidden_size

    @property
    def has_stack(self) -> bool:
        """Whether plans of one token become a decode stack; packed ones only where the ring's tiles suit them."""
        return (
            self.num_layers > 0
            and not (self.packed is not None and self.has_qkv_bias)
            and self.kv_type in (None, self.dtype)
            and self.windows == (None,)
            and self.soft_cap is None
            and self.dtype != torch.float32
            and is_head_dim_stacked(self.head_dim)
        )
