"""attention: paged attention over a plan's work list, in plain torch. The CPU's default and the oracle of the others.

Batches of work items gather their K and V, multiply, mask and normalise; rows with several items are merged by the
log-sum-exp of each part, as split-KV flash decoding does (Dao et al.). No loop runs over requests or heads.

Legend: T tokens, H query heads, K KV heads, G = H / K, D head dim, B block size, P partials; of one chunk: n items,
M query rows, S KV slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.reference.attention_chunks import (
    HIDDEN_SCORE,
    AttentionWork,
    Chunk,
    ChunkedWork,
    Geometry,
    Rows,
)


def attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionWork,
    out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    soft_cap: float | None = None,
) -> None:
    """out[t] = softmax(cap(scale * q[t] . k)) v over the cached keys that token t sees; cap(x) = c * tanh(x / c).

    Scores and sums are fp32 (fp64 for fp64 inputs) whatever the storage types. Cache slots outside the items'
    ranges are never read. A row's result does not depend on the other requests of the step: it is bitwise the same
    in any company, as long as its own request brings the same query tokens and nothing is shared. Cutting a prompt
    elsewhere, or cascade, changes the order of sums.

    Args:
        qkv: [T, (H+2K)*D]; only the queries, first in each row, are read.
        k_cache, v_cache: [num_blocks, K, B, D], rows of D contiguous, all other strides multiples of D.
        plan: what to compute; every token of it is written.
        out: [T, H*D], in any floating type.
        scale: multiplier of q.k.
        soft_cap: tanh cap of scaled scores, or None.
    """
    if not plan.num_items:
        return
    geometry = Geometry(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        token_stride=qkv.stride(0) // head_dim,
        out_stride=out.stride(0) // head_dim,
        cache_strides=k_cache.stride(),
        value_offset=_value_offset(k_cache, v_cache),
        dtype=torch.promote_types(torch.float32, qkv.dtype),
    )
    work = plan.derived.get(geometry)
    if work is None:
        work = plan.derived[geometry] = ChunkedWork(plan, geometry)
    tensors = _Tensors(
        queries=_rows(qkv, head_dim),
        keys=_rows(k_cache, head_dim, geometry.value_offset or 0),
        values=None if geometry.value_offset else _rows(v_cache, head_dim),
        out=_rows(out, head_dim),
        partials=work.scratch("partials", (plan.num_partials * num_heads, head_dim)),
        log_sums=work.scratch("log_sums", (plan.num_partials * num_heads,)),
    )
    for chunk in work:
        _run_chunk(chunk, work, tensors, scale, soft_cap)
    if plan.num_reductions:
        _merge(work, tensors, out)


@dataclass(slots=True)
class _Tensors:
    """One layer's tensors as rows of D. values: None when ``keys`` reaches over the values too."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor | None
    out: torch.Tensor
    partials: torch.Tensor
    log_sums: torch.Tensor


def _run_chunk(
    chunk: Chunk, work: ChunkedWork, tensors: _Tensors, scale: float, soft_cap: float | None
) -> None:
    """Attention of the chunk's items into the output, or into partials with their log-sum-exp."""
    g = work.geometry
    batch = chunk.num_items * g.num_kv_heads
    shape = (batch, chunk.num_rows * g.num_heads // g.num_kv_heads, g.head_dim)
    queries = _take(tensors.queries, chunk.query_rows, work, "queries").view(shape)
    keys, values = _keys_and_values(chunk, work, tensors, batch)
    scores = _scores(chunk, work, queries, keys, scale, soft_cap)
    weights = torch.softmax(scores, -1, out=work.scratch("weights", tuple(scores.shape)))
    result = tensors.out if chunk.is_final else tensors.partials
    if isinstance(chunk.target, slice) and chunk.kept is None and result.dtype == g.dtype:
        torch.bmm(weights, values, out=result[chunk.target].view(shape))
    else:
        product = torch.bmm(weights, values, out=work.scratch("product", shape))
        _put(result, chunk, product.view(-1, g.head_dim))
    if not chunk.is_final:
        # the largest weight is exp(top - top) / sum, so this is top + log(sum) without a second pass of exp
        log_sum = scores.amax(-1) - weights.amax(-1).log_()
        _put(tensors.log_sums, chunk, log_sum.view(-1))


def _keys_and_values(
    chunk: Chunk, work: ChunkedWork, tensors: _Tensors, batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathered K and V, each [n*K, S, D], in the compute type."""
    shape = (batch, chunk.num_slots, work.geometry.head_dim)
    if tensors.values is None:
        both = _take(tensors.keys, chunk.kv_rows, work, "kv").view(2, *shape)
        return both[0], both[1]
    keys = _take(tensors.keys, chunk.kv_rows, work, "keys").view(shape)
    return keys, _take(tensors.values, chunk.kv_rows, work, "values").view(shape)


def _scores(
    chunk: Chunk,
    work: ChunkedWork,
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Scaled, capped and masked scores [n*K, M*G, S]."""
    scores = work.scratch("scores", (queries.shape[0], queries.shape[1], chunk.num_slots))
    keys = keys.transpose(1, 2)
    if chunk.bias is not None and soft_cap is None:
        return torch.baddbmm(chunk.bias, queries, keys, alpha=scale, out=scores)
    factor = scale if soft_cap is None else scale / soft_cap
    torch.baddbmm(scores, queries, keys, beta=0, alpha=factor, out=scores)
    if soft_cap is not None:
        scores.tanh_().mul_(soft_cap)
    if chunk.bias is not None:
        scores.add_(chunk.bias)
    elif chunk.hidden is not None:
        heads = work.geometry.num_kv_heads
        by_row = scores.view(chunk.num_items, heads, chunk.num_rows, -1, chunk.num_slots)
        by_row.masked_fill_(chunk.hidden, HIDDEN_SCORE)
    return scores


def _merge(work: ChunkedWork, tensors: _Tensors, out: torch.Tensor) -> None:
    """Add up each row's partials, weighted by their share of the row's whole sum, into the output."""
    num_heads = work.geometry.num_heads
    tokens, owner = work.merged_tokens, work.owner_of_slot
    log_sums = tensors.log_sums.view(-1, num_heads)
    top = log_sums.new_full((len(tokens), num_heads), HIDDEN_SCORE)
    top.scatter_reduce_(0, owner[:, None].expand_as(log_sums), log_sums, "amax")
    share = (log_sums - top[owner]).exp_()
    share /= torch.zeros_like(top).index_add_(0, owner, share)[owner]
    parts = tensors.partials.mul_(share.view(-1, 1)).view(len(owner), -1)
    merged = parts.new_zeros((len(tokens), parts.shape[1])).index_add_(0, owner, parts)
    out.index_copy_(0, tokens, merged.to(out.dtype))


def _rows(tensor: torch.Tensor, width: int, extra: int = 0) -> torch.Tensor:
    """All memory of ``tensor``, and ``extra`` rows beyond, as rows of ``width`` elements; its strides allow it."""
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    length = tensor.shape[-1] + sum((size - 1) * stride for size, stride in steps)
    return tensor.as_strided((length // width + extra, width), (width, 1))


def _value_offset(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int | None:
    """Rows of D from a key to its value, where one gather can fetch both; else None."""
    distance = v_cache.storage_offset() - k_cache.storage_offset()
    is_shared = k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
    return distance // k_cache.shape[-1] if is_shared and distance > 0 else None


def _take(rows: torch.Tensor, index: Rows, work: ChunkedWork, name: str) -> torch.Tensor:
    """Rows in the compute type: a view where they are consecutive and of that type, else a copy in scratch."""
    dtype = work.geometry.dtype
    if isinstance(index, slice):
        return rows[index].to(dtype)
    scratch = work.scratch(name, (len(index), rows.shape[1]))
    if rows.dtype == dtype:
        return torch.index_select(rows, 0, index, out=scratch)
    return scratch.copy_(rows.index_select(0, index))


def _put(result: torch.Tensor, chunk: Chunk, values: torch.Tensor) -> None:
    """Store the rows of ``values`` that are not padding where the chunk wants them."""
    if chunk.kept is not None:
        values = values[chunk.kept]
    if isinstance(chunk.target, slice):
        result[chunk.target] = values
    else:
        result.index_copy_(0, chunk.target, values.to(result.dtype))
