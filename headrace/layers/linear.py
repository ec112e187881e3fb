"""Linear layers: lists of shards, cut over ranks by rows (column-parallel) or by columns (row-parallel)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from headrace.layers.context import LayerContext
from headrace.quant.base import Shard
from headrace.quant.select import select_method


class Linear:
    """Shards side by side: x [T, in] -> out [T, sum of their rows].

    Args:
        ctx: what layers are built from.
        shards: this rank's parts, all with the same inputs.
    """

    def __init__(self, ctx: LayerContext, shards: Sequence[Shard]) -> None:
        self._parts = []
        self.num_outputs = 0
        methods = [(shard, select_method(ctx.weight_home, shard.name)) for shard in shards]
        for method, group in groupby(methods, key=lambda pair: pair[1]):
            members = [shard for shard, _ in group]
            self._parts.append((method.load(members, ctx.weight_home), self.num_outputs))
            self.num_outputs += sum(shard.num_rows for shard in members)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        for part, col in self._parts:
            part.apply(x, out, col)


class ColumnParallelLinear(Linear):
    """Several matrices [n_i, in] in one, each cut by rows: a rank computes its share of every one's outputs.

    Args:
        names: modules of the checkpoint, in the order of the outputs.
        num_inputs: in.
        num_outputs: n_i of each.
        has_bias: whether each has one.
    """

    def __init__(
        self,
        ctx: LayerContext,
        names: Sequence[str],
        num_inputs: int,
        num_outputs: Sequence[int],
        *,
        has_bias: bool,
    ) -> None:
        shards = [
            Shard(
                name,
                (rows, num_inputs),
                ctx.parallel.share(rows, f"rows of '{name}'"),
                slice(0, num_inputs),
                has_bias,
            )
            for name, rows in zip(names, num_outputs, strict=True)
        ]
        super().__init__(ctx, shards)


class QKVParallelLinear(Linear):
    """Queries, keys and values in one, cut by heads. With more ranks than KV heads, ranks share a KV head.

    Args:
        name: the attention module of the checkpoint; q_proj, k_proj and v_proj are below it.
        hidden_size: inputs.
        num_heads, num_kv_heads, head_dim: of the whole model.
    """

    def __init__(
        self,
        ctx: LayerContext,
        name: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        has_bias: bool,
    ) -> None:
        query_heads = ctx.parallel.share(num_heads, "attention heads")
        kv_heads = ctx.parallel.kv_share(num_kv_heads)
        shards = [
            Shard(
                f"{name}.{part}",
                (total * head_dim, hidden_size),
                slice(heads.start * head_dim, heads.stop * head_dim),
                slice(0, hidden_size),
                has_bias,
            )
            for part, total, heads in (
                ("q_proj", num_heads, query_heads),
                ("k_proj", num_kv_heads, kv_heads),
                ("v_proj", num_kv_heads, kv_heads),
            )
        ]
        super().__init__(ctx, shards)


class RowParallelLinear(Linear):
    """One matrix [n, in], cut by columns: a rank has its share of the inputs, and the results are summed.

    Args:
        name: the module of the checkpoint.
        num_inputs, num_outputs: of the whole matrix.
        has_bias: whether it has one, which the first rank adds.
    """

    def __init__(
        self, ctx: LayerContext, name: str, num_inputs: int, num_outputs: int, *, has_bias: bool
    ) -> None:
        columns = ctx.parallel.share(num_inputs, f"columns of '{name}'")
        adds_bias = has_bias and ctx.parallel.rank == 0
        shard = Shard(name, (num_outputs, num_inputs), slice(0, num_outputs), columns, adds_bias)
        super().__init__(ctx, [shard])
        self._ops = ctx.ops
        self._must_reduce = ctx.parallel.size > 1

    def __call__(self, x: Tensor, out: Tensor) -> None:
        super().__call__(x, out)
        if self._must_reduce:
            self._ops.all_reduce(out)
