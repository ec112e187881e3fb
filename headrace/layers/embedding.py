"""The vocabulary at both ends of a model, cut over ranks by its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.arena import Buffer
from headrace.layers.context import LayerContext
from headrace.layers.sliced_logits import SlicedLogits, VocabularySlices
from headrace.parallel.state import ParallelState
from headrace.quant.base import LoadedLinear, Shard
from headrace.quant.packed import PackedLinear, PackedMethod
from headrace.quant.select import select_method
from headrace.quant.unquantized import DenseLinear

_HALF = (torch.bfloat16, torch.float16)


class VocabParallelEmbedding:
    """Token ids to rows of a table. A rank holds its share of the rows, gives zeros for others, and all are summed.

    Args:
        ctx: what layers are built from.
        name: the module of the checkpoint.
        vocab_size, hidden_size: the table's shape.
        scale: multiplier of the rows.

    Attributes:
        weight: [this rank's rows, hidden_size], or what ``pack_table`` makes of that. A table stored in a narrower
            float type stays so: rows widen as they are looked up, with the same result.
    """

    def __init__(self, ctx: LayerContext, name: str, vocab_size: int, hidden_size: int, scale: float) -> None:
        rows = share_vocabulary(ctx.parallel, vocab_size)
        shard = Shard(name, (vocab_size, hidden_size), rows, slice(0, hidden_size), has_bias=False)
        method = select_method(ctx.weight_home, name)
        self.weight: Any = None
        self.matrix: Any = None
        if isinstance(method, PackedMethod):
            self.matrix = method.load_matrix([shard], ctx.weight_home)
        else:
            self.weight = self._load_dense(ctx, shard)
        self._ops = ctx.ops
        self._scale = scale
        self._first_row = rows.start if ctx.parallel.size > 1 else None

    def __call__(self, ids: Tensor, out: Tensor) -> None:
        """ids: [T] int64; out: [T, hidden_size]."""
        if self.matrix is not None:
            self._ops.embedding_packed(ids, self.matrix, out, self._scale, self._first_row)
        else:
            self._ops.embedding(ids, self.weight, out, self._scale, self._first_row)
        if self._first_row is not None:
            self._ops.all_reduce(out)

    def as_head(self, ctx: LayerContext) -> LoadedLinear:
        """The table as a head multiplies with it; from now on the same memory, if the types agree."""
        if self.matrix is not None:
            return PackedLinear(ctx.ops, self.matrix, None, ctx.weight_home.input_bits)
        kept = self._ops.weight_dtype(self.weight.dtype, ctx.dtype)
        packed = self._ops.pack_table(self.weight.to(kept))
        if self.weight.dtype == kept:
            self.weight = packed
        return DenseLinear(ctx.ops, packed, None)

    @staticmethod
    def _load_dense(ctx: LayerContext, shard: Shard) -> Tensor:
        stored = ctx.weights.get(f"{shard.name}.weight", (shard.rows,), shape=shard.shape)
        dtype = ctx.dtype
        if stored.tensor is not None and stored.tensor.dtype in _HALF and dtype not in _HALF:
            dtype = stored.tensor.dtype
        return stored.dequantize(dtype, ctx.device)


class ParallelLMHead:
    """Hidden states of chosen rows to logits, each rank's over its slice of the vocabulary (``keeps_slices``).

    Args:
        ctx: what layers are built from.
        name: the module of the checkpoint.
        vocab_size, hidden_size: shape of its matrix.
        tied_to: the embedding whose table it shares, instead of a matrix of its own.
        soft_cap: tanh cap of the logits, or None.
    """

    def __init__(
        self,
        ctx: LayerContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabParallelEmbedding | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self._ops = ctx.ops
        self._soft_cap = soft_cap
        self._matrix = self._load(ctx, name, (vocab_size, hidden_size), tied_to)
        self._keeps_slices = ctx.parallel.keeps_slices
        self._slices: VocabularySlices | None = None
        if ctx.parallel.size > 1:
            own = share_vocabulary(ctx.parallel, vocab_size)
            self._slices = VocabularySlices(
                ctx.parallel.size, own, vocab_size, ctx.ops.all_gather, ctx.device
            )
        width = vocab_size if self._slices is None else self._slices.width
        # Not of the arena, which would reserve as many rows as a step has tokens.
        self._chosen = Buffer("chosen", hidden_size, ctx.dtype, ctx.device)
        self._local = Buffer("logits", width, torch.float32, ctx.device)

    def __call__(self, hidden: Tensor, rows: Tensor) -> SlicedLogits:
        """hidden [T, E], rows [R] int64 -> logits of R rows, valid until the next call."""
        num_rows = len(rows)
        chosen, logits = self._chosen.rows(num_rows), self._local.rows(num_rows)
        self._ops.gather_rows(hidden, rows, chosen)
        self._matrix.apply(chosen, logits, 0)
        if self._soft_cap is not None:
            self._ops.soft_cap(logits, self._soft_cap)
        found = SlicedLogits(logits, self._slices)
        return found if self._keeps_slices else SlicedLogits(found.whole())

    @property
    def buffers(self) -> tuple[Buffer, Buffer]:
        """What a call writes: the chosen hidden states, and the logits."""
        return self._chosen, self._local

    def reserve(self, num_rows: int) -> None:
        """Make room for the logits of so many rows."""
        self._chosen.reserve(num_rows)
        self._local.reserve(num_rows)
        if self._slices is not None:
            self._slices.reserve(num_rows)

    @staticmethod
    def _load(
        ctx: LayerContext, name: str, shape: tuple[int, int], tied_to: VocabParallelEmbedding | None
    ) -> LoadedLinear:
        if tied_to is not None:
            return tied_to.as_head(ctx)
        shard = Shard(
            name, shape, share_vocabulary(ctx.parallel, shape[0]), slice(0, shape[1]), has_bias=False
        )
        return select_method(ctx.weight_home, name).load([shard], ctx.weight_home)


def share_vocabulary(parallel: ParallelState, vocab_size: int) -> slice:
    """This rank's rows: equal shares, but the last ranks may have fewer."""
    each = -(-vocab_size // parallel.size)
    return slice(min(parallel.rank * each, vocab_size), min((parallel.rank + 1) * each, vocab_size))
