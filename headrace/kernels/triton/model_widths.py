"""ModelWidths: the sizes of a model that its kernels are compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

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
class LayerForms:
    """The forms of a layer's linears; None: dense."""

    q_proj: PackedForm | None = None
    k_proj: PackedForm | None = None
    v_proj: PackedForm | None = None
    o_proj: PackedForm | None = None
    gate_proj: PackedForm | None = None
    up_proj: PackedForm | None = None
    down_proj: PackedForm | None = None

    @classmethod
    def all_in(cls, form: PackedForm | None) -> LayerForms:
        """A layer that is kept in one form."""
        return cls(*[form] * 7)

    @property
    def qkv(self) -> tuple[PackedForm | None, ...]:
        """Of queries, keys and values, which are one product where they are alike."""
        return self.q_proj, self.k_proj, self.v_proj

    @property
    def gate_up(self) -> tuple[PackedForm | None, ...]:
        """Of gate and up, which are one product where they are alike."""
        return self.gate_proj, self.up_proj

    @property
    def is_stackable(self) -> bool:
        """Whether a decode stack takes such layers: four products, all dense or all packed."""
        forms = (*self.qkv, *self.gate_up, self.o_proj, self.down_proj)
        are_whole = len({*self.qkv}) == len({*self.gate_up}) == 1
        return are_whole and len({form is None for form in forms}) == 1


@dataclass(frozen=True, slots=True)
class Product:
    """A linear as it is computed: modules of one form side by side."""

    num_outputs: int
    num_inputs: int
    has_bias: bool
    form: PackedForm | None


@dataclass(frozen=True, slots=True)
class ModelWidths:
    """What the kernels of a model depend on, of one rank.

    windows: of its layers, each once; None is full attention.
    has_qk_norm, has_qkv_bias, activation: see the layers.
    kv_type: of stored keys and values; None: ``dtype``.
    num_layers: of this rank's stage, where all of them and the embedding are there; 0: they make no decode stack.
    num_slices: parts of the vocabulary that tokens are picked from; ``vocab_size`` is that of this rank's.
    layer_forms: the forms that the linears of its layers have, each kind of layer once.
    embedding_form, head_form: of the vocabulary's tables; None: dense.
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
    layer_forms: tuple[LayerForms, ...] = (LayerForms(),)
    embedding_form: PackedForm | None = None
    head_form: PackedForm | None = None

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
    def products(self) -> list[Product]:
        """Of the layers' linears, each once, the largest first."""
        head_dim, found = self.head_dim, dict[Product, None]()
        qkv_rows = [heads * head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        for forms in self.layer_forms:
            found |= self._merged(forms.gate_up, [self.intermediate_size] * 2, self.hidden_size)
            found[Product(*self.down, False, forms.down_proj)] = None
            found |= self._merged(forms.qkv, qkv_rows, self.hidden_size, self.has_qkv_bias)
            found[Product(*self.output, False, forms.o_proj)] = None
        return list(found)

    @staticmethod
    def _merged(
        forms: Sequence[PackedForm | None], num_rows: Sequence[int], num_inputs: int, has_bias: bool = False
    ) -> dict[Product, None]:
        """Neighbours of one form are one product."""
        pairs = groupby(zip(forms, num_rows, strict=True), key=lambda pair: pair[0])
        return {
            Product(sum(rows for _, rows in members), num_inputs, has_bias, form): None
            for form, members in pairs
        }

    @property
    def has_stack(self) -> bool:
        """Whether plans of one token become a decode stack; packed ones only where the ring's tiles suit them."""
        return (
            self.num_layers > 0
            and len(self.layer_forms) == 1
            and self.layer_forms[0].is_stackable
            and not (self.layer_forms[0].o_proj is not None and self.has_qkv_bias)
            and self.kv_type in (None, self.dtype)
            and self.windows == (None,)
            and self.soft_cap is None
            and self.dtype != torch.float32
            and is_head_dim_stacked(self.head_dim)
        )
