"""attention: paged attention over a plan's work list, in plain torch. The CPU's default and the oracle of the others.

Batches of work items gather their K and V, multiply, mask and normalise; rows with several items are merged by the
log-sum-exp of each part, as split-KV flash decoding does (Dao et al.). No loop runs over requests or heads.

Legend: T tokens, H query heads, K KV heads, G = H / K, D head dim, B block size, P partials; of one chunk: n items,
M query rows, S KV slots.
"""

from __future__ import annotations

import copy

import torch

from headrace.kernels.quantized_cache import QuantizedCache
from headrace.kernels.reference.attention_chunks import HIDDEN_SCORE, Chunk, ChunkedWork, tensor_rows
from headrace.kernels.reference.attention_items import AttentionWork, Geometry


def attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor | QuantizedCache,
    v_cache: torch.Tensor | QuantizedCache,
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
        k_cache, v_cache: [num_blocks, K, B, D], rows of D contiguous, all other strides multiples of D. Or a
            ``QuantizedCache`` each, of which the blocks in the plan's table are decoded first.
        plan: what to compute; every token of it is written.
        out: [T, H*D], in any floating type.
        scale: multiplier of q.k.
        soft_cap: tanh cap of scaled scores, or None.
    """
    if not plan.num_items:
        return
    if isinstance(k_cache, QuantizedCache) or isinstance(v_cache, QuantizedCache):
        k_cache, v_cache, plan = _decoded(
            k_cache, v_cache, plan, torch.promote_types(torch.float32, qkv.dtype)
        )
    # layers bring the same activations (ids are theirs while the work is kept) and caches alike
    heads = (num_heads, num_kv_heads, head_dim)
    cache = (k_cache.shape, k_cache.stride(), k_cache.dtype, v_cache.data_ptr() - k_cache.data_ptr())
    key = (id(qkv), id(out), heads, cache)
    work = plan.derived.get(key)
    if work is None:
        geometry = Geometry(*heads, *cache[:3], qkv.dtype, _value_rows(k_cache, v_cache))
        work = plan.derived[key] = ChunkedWork(plan, geometry, qkv, out)
    for chunk in work:
        _run_chunk(chunk, work, k_cache, v_cache, scale, soft_cap)
    if plan.num_reductions:
        _merge(work, out)


def _value_rows(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int | None:
    """Rows of D from a key to its value where V's planes follow K's in each block, as in a ``KVCacheLayout``."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    size = num_kv_heads * block_size * head_dim
    is_joint = (
        v_cache.data_ptr() - k_cache.data_ptr() == size * k_cache.element_size()
        and k_cache.stride(0) >= 2 * size
    )
    return size // head_dim if is_joint else None


def _decoded(
    k_cache: torch.Tensor | QuantizedCache,
    v_cache: torch.Tensor | QuantizedCache,
    plan: AttentionWork,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, AttentionWork]:
    """Dense caches of the blocks that the plan may read, and the plan over those."""
    assert isinstance(k_cache, QuantizedCache) and isinstance(v_cache, QuantizedCache)
    kept = plan.derived.get("decoded")
    if kept is None:
        # entries beyond a request's blocks may be anything
        table = plan.block_table.long().clamp(0, len(k_cache.codes) - 1)
        blocks, places = table.unique(return_inverse=True)
        moved = copy.copy(plan)
        moved.block_table, moved.derived = places.to(plan.block_table.dtype), {}
        kept = plan.derived["decoded"] = (blocks, moved)
    blocks, moved = kept
    return k_cache.decode_blocks(blocks, dtype), v_cache.decode_blocks(blocks, dtype), moved


def _run_chunk(
    chunk: Chunk,
    work: ChunkedWork,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Attention of the chunk's items into the output, or into partials with their log-sum-exp."""
    scratch = chunk.scratch
    if chunk.pair_rows is not None:
        rows = tensor_rows(k_cache, work.num_pair_rows, work.geometry.head_dim)
        _gather(rows, chunk.pair_rows, scratch.pairs, scratch.stored)
    else:
        rows = tensor_rows(k_cache, work.num_cache_rows, work.geometry.head_dim)
        _gather(rows, chunk.kv_rows, scratch.keys, scratch.stored)
    scores = _scores(chunk, work, scale, soft_cap)
    weights = torch.softmax(scores, -1, out=scratch.weights)
    if chunk.bag_rows is not None and chunk.bag_starts is not None:
        values = tensor_rows(v_cache, work.num_cache_rows, work.geometry.head_dim)
        bags = (chunk.bag_rows, chunk.bag_starts)
        sums = torch.embedding_bag(values, *bags, False, 0, False, weights.view(-1))[0]
    else:
        if chunk.pair_rows is None:
            values = tensor_rows(v_cache, work.num_cache_rows, work.geometry.head_dim)
            _gather(values, chunk.kv_rows, scratch.values, scratch.stored)
        torch.bmm(weights, scratch.values_3d, out=scratch.product_3d)
        sums = scratch.product
    chunk.target.put(sums)
    if chunk.log_target is not None:
        # the largest weight is exp(top - top) / sum, so this is top + log(sum) without a second pass of exp
        log_sum = scores.amax(-1) - weights.amax(-1).log_()
        chunk.log_target.put(log_sum.view(-1, 1))


def _scores(chunk: Chunk, work: ChunkedWork, scale: float, soft_cap: float | None) -> torch.Tensor:
    """Scaled, capped and masked scores [n*K, M*G, S]."""
    scratch, scores = chunk.scratch, chunk.scratch.scores
    queries = chunk.queries
    if queries is None:
        assert chunk.query_rows is not None
        _gather(work.query_rows, chunk.query_rows, scratch.queries, None)
        queries = scratch.queries_3d
    elif queries.dtype != scores.dtype:
        queries = scratch.queries_3d.copy_(queries)
    if chunk.bias is not None and soft_cap is None:
        return torch.baddbmm(chunk.bias, queries, scratch.keys_t, alpha=scale, out=scores)
    factor = scale if soft_cap is None else scale / soft_cap
    torch.baddbmm(scores, queries, scratch.keys_t, beta=0, alpha=factor, out=scores)
    if soft_cap is not None:
        scores.tanh_().mul_(soft_cap)
    if chunk.bias is not None:
        scores.add_(chunk.bias)
    elif chunk.hidden is not None:
        scratch.scores_by_row.masked_fill_(chunk.hidden, HIDDEN_SCORE)
    return scores


def _merge(work: ChunkedWork, out: torch.Tensor) -> None:
    """Add up each row's partials, weighted by their share of the row's whole sum, into the output."""
    num_heads = work.geometry.num_heads
    tokens, owner = work.merged_tokens, work.owner_of_slot
    parts, log_sums = work.partials, work.log_sums.view(-1, num_heads)
    top = log_sums.new_full((len(tokens), num_heads), HIDDEN_SCORE)
    top.scatter_reduce_(0, owner[:, None].expand_as(log_sums), log_sums, "amax")
    share = (log_sums - top[owner]).exp_()
    share /= torch.zeros_like(top).index_add_(0, owner, share)[owner]
    weighted = parts.mul_(share.view(-1, 1)).view(len(owner), -1)
    merged = weighted.new_zeros((len(tokens), weighted.shape[1])).index_add_(0, owner, weighted)
    out.index_copy_(0, tokens, merged.to(out.dtype))


def _gather(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor, stored: torch.Tensor | None) -> None:
    """Chosen rows into ``out`` [m, D] in its type, by way of ``stored`` [at least m, D] in theirs, if it is there."""
    if rows.dtype == out.dtype:
        torch.index_select(rows, 0, index, out=out)
    elif stored is None:
        out.copy_(rows.index_select(0, index))
    else:
        out.copy_(torch.index_select(rows, 0, index, out=stored[: len(index)]))
