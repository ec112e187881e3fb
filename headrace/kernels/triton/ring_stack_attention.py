"""Attention of one token inside the ring stack's kernel: query and key norms, rotation, K and V into the cache, splits
of the context over programs, and their merging by the last program of a KV head (FlashDecoding, Dao et al.).

What does not depend on the token (old keys and values, already as operands; weights of norms) is loaded before the wait
for its queries. The token's own key and value are where the online softmax of the last split begins.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from headrace.kernels.triton.attention_common import HIDDEN, LOG2_E
from headrace.kernels.triton.gluon_names import barrier
from headrace.kernels.triton.weight_ring import NUM_WARPS

_HIDDEN, _LOG2_E = gl.constexpr(HIDDEN.value), gl.constexpr(LOG2_E.value)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, NUM_WARPS], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SCORES.value, 2))


@gluon.constexpr_function
def rows_of(width):
    """Threads side by side over rows of ``width`` numbers, eight each."""
    lanes = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [NUM_WARPS, 1], [1, 0])


@gluon.constexpr_function
def _columns_of(height):
    """A thread has whole columns."""
    return gl.BlockedLayout([height, 1], [1, 32], [1, NUM_WARPS], [1, 0])


@gluon.jit
def load_halves(row_ptr, C: gl.constexpr):
    """fp32 ([D/2], [D/2]): the halves of one head's numbers."""
    dim = gl.arange(0, C.half, layout=gl.SliceLayout(0, rows_of(C.half)))
    return gl.load(row_ptr + dim).to(gl.float32), gl.load(row_ptr + C.half + dim).to(gl.float32)


@gluon.jit
def _load_queries(qkv_ptr, kv_head, C: gl.constexpr):
    """fp32 ([M, D/2], [M, D/2]): the halves of the queries of one KV head, zeros beyond its group."""
    HALF: gl.constexpr = rows_of(C.half)
    m = gl.arange(0, C.block_m, layout=gl.SliceLayout(1, HALF))[:, None]
    place = qkv_ptr + (kv_head * C.group + m) * C.head_dim
    place += gl.arange(0, C.half, layout=gl.SliceLayout(0, HALF))[None, :]
    mask = gl.broadcast(m < C.group, place)[0]
    first = gl.load(place, mask=mask, other=0.0).to(gl.float32)
    return first, gl.load(place + C.half, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _turned(first, second, cos, sin, dtype: gl.constexpr):
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@gluon.jit
def load_unit(k_ptr, v_ptr, table_ptr, index, length, block_stride, C: gl.constexpr):
    """The first old keys and values of a unit of attention, as ``_load_keys`` gives them."""
    kv_head, first, end, _ = _unit(index, length, C)
    offset = kv_head * C.head_stride
    return _load_keys(k_ptr + offset, v_ptr + offset, table_ptr, first, end, block_stride, C)


@gluon.jit
def _load_keys(k_ptr, v_ptr, table_ptr, first, end, block_stride, C: gl.constexpr):
    """([N, D/2], [N, D/2], [N, D]): keys, in halves, and values from ``first`` on, zeros from ``end`` on."""
    HALF: gl.constexpr = rows_of(C.half)
    WHOLE: gl.constexpr = rows_of(C.head_dim)
    half = gl.arange(0, C.half, layout=gl.SliceLayout(0, HALF))[None, :]
    dim = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, WHOLE))[None, :]
    place, is_key = _key_places(table_ptr, first, end, block_stride, C, HALF)
    k_first = gl.load(k_ptr + place + half, mask=is_key, other=0.0)
    k_second = gl.load(k_ptr + place + C.half + half, mask=is_key, other=0.0)
    place, is_key = _key_places(table_ptr, first, end, block_stride, C, WHOLE)
    return k_first, k_second, gl.load(v_ptr + place + dim, mask=is_key, other=0.0)


@gluon.jit
def as_operands(k_first, k_second, v):
    """([D/2, N], [D/2, N], [N, D]): as the matrix units take them."""
    k_first, k_second = k_first.permute([1, 0]), k_second.permute([1, 0])
    return gl.convert_layout(k_first, RIGHT), gl.convert_layout(k_second, RIGHT), gl.convert_layout(v, RIGHT)


@gluon.jit
def _key_places(table_ptr, first, end, block_stride, C: gl.constexpr, LAYOUT: gl.constexpr):
    """([N, 1] offset of keys from ``first`` on, [N, 1] whether they are before ``end``)."""
    key = first + gl.arange(0, C.block_keys, layout=gl.SliceLayout(1, LAYOUT))
    block = gl.load(table_ptr + key // C.block_size, mask=key < end, other=0).to(gl.int64)
    return (block * block_stride + (key % C.block_size) * C.head_dim)[:, None], (key < end)[:, None]


@gluon.jit
def _attend(q_first, q_second, k_first, k_second, v, first, end, top, total, acc, scale, C: gl.constexpr):
    """One round of the online softmax: (top [M], total [M], acc [M, D]) with the keys from ``first`` on."""
    key = first + gl.arange(0, C.block_keys, layout=gl.SliceLayout(0, SCORES))
    score = gl.full([C.block_m, C.block_keys], 0.0, gl.float32, SCORES)
    score = mma_v2(q_first, k_first, score)
    score = mma_v2(q_second, k_second, score) * scale
    score = gl.where((key < end)[None, :], score, _HIDDEN)
    new_top = gl.maximum(top, gl.max(score, axis=1))
    weight = gl.exp2(score - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(weight, axis=1)
    acc = mma_v2(gl.convert_layout(weight.to(v.dtype), LEFT), v, acc * shrink[:, None])
    return new_top, total, acc


@gluon.jit
def _merge(partials_ptr, log_sums_ptr, kv_head, num_splits, out_ptr, C: gl.constexpr):
    """The splits of one KV head's queries, weighted by their share of the whole sum."""
    COLUMNS: gl.constexpr = _columns_of(C.block_splits)
    split = gl.arange(0, C.block_splits, layout=gl.SliceLayout(1, COLUMNS))[:, None]
    col = gl.arange(0, C.block_group * C.head_dim, layout=gl.SliceLayout(0, COLUMNS))[None, :]
    slot = (kv_head * C.max_splits + split) * C.block_m + col // C.head_dim
    inside = (split < num_splits) & (col < C.group * C.head_dim)
    log_sum = gl.load(log_sums_ptr + slot, mask=inside, other=_HIDDEN)
    part = gl.load(partials_ptr + slot * C.head_dim + col % C.head_dim, mask=inside, other=0.0)
    weight = gl.exp2(log_sum - gl.max(log_sum, axis=0)[None, :])
    result = gl.sum(part * weight, axis=0) / gl.sum(weight, axis=0)
    col = gl.arange(0, C.block_group * C.head_dim, layout=gl.SliceLayout(0, COLUMNS))
    width = C.group * C.head_dim
    gl.store(out_ptr + kv_head * width + col, result.to(out_ptr.dtype.element_ty), mask=col < width)


@gluon.jit
def _unit(index, length, C: gl.constexpr):
    """(KV head, first key, end of the old keys, number of splits) of a unit; the cut depends on the length alone."""
    share = gl.cdiv(gl.cdiv(length, C.max_splits), C.block_keys) * C.block_keys
    first = index // C.num_kv_heads * share
    return index % C.num_kv_heads, first, gl.minimum(first + share, length - 1), gl.cdiv(length, share)


@gluon.jit
def _turned_heads(qkv_ptr, kv_head, norms, cos, sin, eps, C: gl.constexpr):
    """([M, D/2], [M, D/2], [D/2], [D/2]): the halves of a KV head's queries and of its new key, normed and rotated."""
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    q_first, q_second = _load_queries(qkv_ptr, kv_head, C)
    k_first, k_second = load_halves(qkv_ptr + (C.num_heads + kv_head) * C.head_dim, C)
    if C.has_qk_norm:
        q_1, q_2, k_1, k_2 = norms
        squares = gl.sum(q_first * q_first + q_second * q_second, axis=1)
        inverse = gl.rsqrt(squares / C.head_dim + eps)[:, None]
        q_first, q_second = q_first * inverse * q_1[None, :], q_second * inverse * q_2[None, :]
        squares = gl.sum(k_first * k_first + k_second * k_second, axis=0)
        inverse = gl.rsqrt(squares / C.head_dim + eps)
        k_first, k_second = k_first * inverse * k_1, k_second * inverse * k_2
    q_first, q_second = _turned(q_first, q_second, cos[None, :], sin[None, :], dtype)
    k_first, k_second = _turned(k_first, k_second, cos, sin, dtype)
    return q_first, q_second, k_first, k_second


@gluon.jit
def _own_start(q_first, q_second, k_first, k_second, new_v, is_last, scale, C: gl.constexpr):
    """(top [M], total [M], acc [M, D]) before any old key: those of the token's own, if the split is the last."""
    score = q_first.to(gl.float32) * k_first.to(gl.float32)[None, :]
    score += q_second.to(gl.float32) * k_second.to(gl.float32)[None, :]
    score = gl.convert_layout(gl.sum(score, axis=1), gl.SliceLayout(1, SCORES)) * scale
    own = gl.where(is_last, 1.0, 0.0)
    total = gl.full([C.block_m], 0.0, gl.float32, gl.SliceLayout(1, SCORES)) + own
    acc = gl.full([C.block_m, C.head_dim], 0.0, gl.float32, SCORES) + (new_v.to(gl.float32) * own)[None, :]
    return gl.where(is_last, score, _HIDDEN), total, acc


@gluon.jit
def _put(
    top,
    total,
    acc,
    kv_head,
    split,
    num_splits,
    partials_ptr,
    log_sums_ptr,
    tickets_ptr,
    out_ptr,
    C: gl.constexpr,
):
    """Store a unit's result; of several splits the last to come merges them all."""
    row = gl.arange(0, C.block_m, layout=gl.SliceLayout(1, SCORES))
    col = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, SCORES))[None, :]
    result = acc / total[:, None]
    is_query = (row < C.group)[:, None]
    if num_splits == 1:
        target = out_ptr + (kv_head * C.group + row)[:, None] * C.head_dim + col
        gl.store(target, result.to(out_ptr.dtype.element_ty), mask=is_query)
    else:
        place = (kv_head * C.max_splits + split) * C.block_m + row
        gl.store(partials_ptr + place[:, None] * C.head_dim + col, result, mask=is_query)
        gl.store(log_sums_ptr + place, top + gl.log2(total), mask=row < C.group)
        barrier()
        if gl.atomic_add(tickets_ptr + kv_head, 1, sem="acq_rel") == num_splits - 1:
            barrier()
            _merge(partials_ptr, log_sums_ptr, kv_head, num_splits, out_ptr, C)
            gl.store(tickets_ptr + kv_head, 0)


@gluon.jit
def attend_units(
    k_first, k_second, v, qkv_ptr, norms, k_ptr, v_ptr, table_ptr, cos, sin, length, slot, block_stride, scale, eps,
    partials_ptr, log_sums_ptr, tickets_ptr, out_ptr, C: gl.constexpr,
):  # fmt: skip
    """Attention of the token's queries over its cache and itself; the last program of a KV head merges its splits.

    ``k_first``, ``k_second`` and ``v`` are the first keys and values of this program's first unit. norms: the halves of
    the queries' and the keys' norm weights.
    """
    col = gl.arange(0, C.head_dim, layout=gl.SliceLayout(0, SCORES))
    half = gl.arange(0, C.half, layout=gl.SliceLayout(0, rows_of(C.half)))
    _, _, _, num_splits = _unit(0, length, C)
    for unit in range(gl.program_id(0), num_splits * C.num_kv_heads, gl.num_programs(0)):
        kv_head, first, end, _ = _unit(unit, length, C)
        split = unit // C.num_kv_heads
        is_last = split == num_splits - 1
        new_v = gl.load(qkv_ptr + (C.num_heads + C.num_kv_heads + kv_head) * C.head_dim + col)
        q_first, q_second, new_first, new_second = _turned_heads(qkv_ptr, kv_head, norms, cos, sin, eps, C)
        top, total, acc = _own_start(
            q_first, q_second, new_first, new_second, new_v, is_last, scale * _LOG2_E, C
        )
        q_first, q_second = gl.convert_layout(q_first, LEFT), gl.convert_layout(q_second, LEFT)
        offset = kv_head * C.head_stride
        for start in range(first, end, C.block_keys):
            top, total, acc = _attend(
                q_first, q_second, k_first, k_second, v, start, end, top, total, acc, scale * _LOG2_E, C
            )
            following = start + C.block_keys
            if following < end:
                k_first, k_second, v = as_operands(
                    *_load_keys(k_ptr + offset, v_ptr + offset, table_ptr, following, end, block_stride, C)
                )
        if is_last & (slot >= 0):
            place = (slot // C.block_size) * block_stride + (slot % C.block_size) * C.head_dim + offset
            gl.store(k_ptr + place + half, new_first)
            gl.store(k_ptr + place + C.half + half, new_second)
            gl.store(v_ptr + place + col, new_v)
        _put(top, total, acc, kv_head, split, num_splits, partials_ptr, log_sums_ptr, tickets_ptr, out_ptr, C)
        if unit + gl.num_programs(0) < num_splits * C.num_kv_heads:
            k_first, k_second, v = as_operands(
                *load_unit(k_ptr, v_ptr, table_ptr, unit + gl.num_programs(0), length, block_stride, C)
            )
