"""Attention: the block between two points of the residual stream, over the paged KV cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import ForwardBatch
from headrace.layers.context import LayerContext
from headrace.layers.linear import QKVParallelLinear, RowParallelLinear, share_kv_heads
from headrace.layers.norm import load_norm_weight


class KVCacheViews(Protocol):
    """What attention layers need of the KV cache (``runtime/kv_cache.py``)."""

    def layer_group(self, layer_id: int) -> int:
        """Which entry of ``ForwardBatch.groups`` belongs to the layer."""

    def layer_views(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """(k, v), each [num_blocks, K, B, D], strided over blocks."""


class Attention:
    """Projections, optional query and key norms, rotary embedding, attention, output projection.

    Args:
        ctx: what layers are built from.
        name: the module of the checkpoint.
        layer_id: number of the layer, by which the KV cache knows it.
        hidden_size: width of the residual stream.
        shape: heads of the whole model.
        cos_sin: [P, D] rotary table.
        scale: multiplier of query-key products.
        soft_cap: tanh cap of scaled scores, or None.
        has_qkv_bias, has_output_bias: whether those projections have biases.
        qk_norm_eps: eps of the per-head norms q_norm and k_norm; None: there are none.
    """

    def __init__(
        self,
        ctx: LayerContext,
        name: str,
        layer_id: int,
        hidden_size: int,
        shape: AttentionShape,
        cos_sin: Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        has_qkv_bias: bool = False,
        has_output_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        self._ops = ctx.ops
        self._layer_id = layer_id
        self._cos_sin = cos_sin
        self._scale = scale
        self._soft_cap = soft_cap
        self._eps = qk_norm_eps or 0.0
        self._q_norm = self._k_norm = None
        if qk_norm_eps is not None:
            self._q_norm = load_norm_weight(ctx, f"{name}.q_norm", shape.head_dim)
            self._k_norm = load_norm_weight(ctx, f"{name}.k_norm", shape.head_dim)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._qkv = QKVParallelLinear(ctx, name, hidden_size, *heads, has_bias=has_qkv_bias, out="qkv")
        width = shape.num_heads * shape.head_dim
        self._output = RowParallelLinear(
            ctx, f"{name}.o_proj", width, hidden_size, has_bias=has_output_bias, out="block"
        )
        local = local_shape(ctx, shape)
        self._heads = (local.num_heads, local.num_kv_heads, local.head_dim)
        self._attended = ctx.buffer("attended", local.num_heads * local.head_dim)

    def bind_kv_cache(self, kv_cache: KVCacheViews) -> None:
        """Takes the layer's views of the cache, before the first call."""
        self._group = kv_cache.layer_group(self._layer_id)
        self._k_cache, self._v_cache = kv_cache.layer_views(self._layer_id)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; the keys and values of ``batch`` enter the cache."""
        group = batch.groups[self._group]
        qkv, attended = self._qkv(x), self._attended.rows
        self._ops.rope_and_store(
            qkv,
            self._q_norm,
            self._k_norm,
            self._eps,
            self._cos_sin,
            batch.positions,
            group.slot_mapping,
            self._k_cache,
            self._v_cache,
            *self._heads,
        )
        self._ops.attention(
            qkv, self._k_cache, self._v_cache, group.plan, attended, *self._heads, self._scale, self._soft_cap
        )
        return self._output(attended)


def local_shape(ctx: LayerContext, shape: AttentionShape) -> AttentionShape:
    """This rank's heads of the whole model's ``shape``.

    Raises:
        ConfigError: the heads cannot be shared out among the ranks.
    """
    query_heads = ctx.parallel.share(shape.num_heads, "attention heads")
    kv_heads = share_kv_heads(ctx.parallel, shape.num_kv_heads)
    return AttentionShape(query_heads.stop - query_heads.start, kv_heads.stop - kv_heads.start, shape.head_dim)
