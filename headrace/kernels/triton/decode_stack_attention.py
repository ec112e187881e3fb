"""Attention of one token inside the decode stack's kernel: query and key norms, rotation, K and V into the cache,
splits of the context over programs, and their merging by the last program of a KV head (FlashDecoding, Dao et al.)."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.attention_common import HIDDEN, LOG2_E


@triton.jit
def _rotated(heads_ptr, norm_ptr, head, is_head, cos, sin, eps, C: tl.constexpr):
    """([M, D/2], [M, D/2]): the halves of some heads, normed and rotated, in the type of the model."""
    dim = tl.arange(0, C.half)
    mask = is_head[:, None]
    place = heads_ptr + head[:, None] * C.head_dim + dim[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + C.half, mask=mask, other=0.0).to(tl.float32)
    if C.has_qk_norm:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(square / C.head_dim + eps)[:, None]
        first = first * scale * tl.load(norm_ptr + dim).to(tl.float32)[None, :]
        second = second * scale * tl.load(norm_ptr + C.half + dim).to(tl.float32)[None, :]
    dtype = heads_ptr.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _new_key(qkv_ptr, norm_ptr, kv_head, cos, sin, eps, C: tl.constexpr):
    """([D/2], [D/2], [D]): the token's own key, in halves, and value of one head."""
    lane = tl.arange(0, C.block_m)
    head = C.num_heads + kv_head + lane * 0
    first, second = _rotated(qkv_ptr, norm_ptr, head, lane == 0, cos, sin, eps, C)  # the other rows are zero
    value_place = (C.num_heads + C.num_kv_heads + kv_head) * C.head_dim + tl.arange(0, C.head_dim)
    return tl.sum(first, axis=0), tl.sum(second, axis=0), tl.load(qkv_ptr + value_place)


@triton.jit
def _load_keys(k_ptr, v_ptr, table_ptr, first, end, block_stride, C: tl.constexpr):
    """([N, D/2], [N, D/2], [N, D]): keys, in halves, and values from ``first`` on, zeros from ``end`` on."""
    key = first + tl.arange(0, C.block_keys)
    is_key = (key < end)[:, None]
    block = tl.load(table_ptr + key // C.block_size, mask=key < end, other=0).to(tl.int64)
    place = (block * block_stride + (key % C.block_size) * C.head_dim)[:, None]
    half = tl.arange(0, C.half)[None, :]
    k_first = tl.load(k_ptr + place + half, mask=is_key, other=0.0)
    k_second = tl.load(k_ptr + place + C.half + half, mask=is_key, other=0.0)
    return (
        k_first,
        k_second,
        tl.load(v_ptr + place + tl.arange(0, C.head_dim)[None, :], mask=is_key, other=0.0),
    )


@triton.jit
def _attend(q_first, q_second, k_first, k_second, v, first, end, top, total, acc, scale, C: tl.constexpr):
    """One round of the online softmax: (top [M], total [M], acc [M, D]) with the keys from ``first`` on."""
    key = first + tl.arange(0, C.block_keys)
    score = tl.dot(q_first, tl.trans(k_first))
    score = tl.dot(q_second, tl.trans(k_second), score) * (scale * LOG2_E)
    score = tl.where((key < end)[None, :], score, HIDDEN)
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return new_top, total, acc


@triton.jit
def _merge(partials_ptr, log_sums_ptr, kv_head, num_splits, out_ptr, C: tl.constexpr):
    """The splits of one KV head's queries, weighted by their share of the whole sum."""
    split, dim = tl.arange(0, C.block_splits), tl.arange(0, C.head_dim)
    inside = split < num_splits
    GROUP: tl.constexpr = C.group
    for index in tl.static_range(GROUP):
        slot = (kv_head * C.max_splits + split) * C.block_m + index
        log_sum = tl.load(log_sums_ptr + slot, mask=inside, other=HIDDEN)
        part = tl.load(
            partials_ptr + slot[:, None] * C.head_dim + dim[None, :], mask=inside[:, None], other=0.0
        )
        weight = tl.exp2(log_sum - tl.max(log_sum, axis=0))
        result = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
        place = out_ptr + (kv_head * C.group + index) * C.head_dim + dim
        tl.store(place, result.to(out_ptr.dtype.element_ty))


@triton.jit
def _unit(index, length, C: tl.constexpr):
    """(KV head, first key, end, number of splits) of a unit of attention; the cut depends on the length alone."""
    share = tl.cdiv(tl.cdiv(length, C.max_splits), C.block_keys) * C.block_keys
    first = index // C.num_kv_heads * share
    return index % C.num_kv_heads, first, tl.minimum(first + share, length), tl.cdiv(length, share)


@triton.jit
def load_unit(k_ptr, v_ptr, table_ptr, index, length, block_stride, C: tl.constexpr):
    """The first cached keys and values of a unit; the token's own are not among them."""
    kv_head, first, end, _ = _unit(index, length, C)
    offset = kv_head * C.head_stride
    return _load_keys(
        k_ptr + offset, v_ptr + offset, table_ptr, first, tl.minimum(end, length - 1), block_stride, C
    )


@triton.jit
def attend_units(
    k_first, k_second, v, qkv_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr, table_ptr, cos, sin, length, slot,
    block_stride, scale, eps, partials_ptr, log_sums_ptr, tickets_ptr, out_ptr, C: tl.constexpr,
):  # fmt: skip
    """Attention of the token's queries over its cache and itself; the last program of a KV head merges its splits.

    ``k_first``, ``k_second`` and ``v`` are the first keys and values of this program's first unit.
    """
    m, dim, half = tl.arange(0, C.block_m), tl.arange(0, C.head_dim), tl.arange(0, C.half)
    _, _, _, num_splits = _unit(0, length, C)
    for unit in range(tl.program_id(0), num_splits * C.num_kv_heads, tl.num_programs(0)):
        kv_head, first, end, _ = _unit(unit, length, C)
        offset = kv_head * C.head_stride
        head = kv_head * C.group + m
        q_first, q_second = _rotated(qkv_ptr, q_norm_ptr, head, m < C.group, cos, sin, eps, C)
        new_first, new_second, new_v = _new_key(qkv_ptr, k_norm_ptr, kv_head, cos, sin, eps, C)
        top = tl.full([C.block_m], HIDDEN, tl.float32)
        total = tl.full([C.block_m], 0.0, tl.float32)
        acc = tl.full([C.block_m, C.head_dim], 0.0, tl.float32)
        for start in range(first, end, C.block_keys):
            is_new = (start + tl.arange(0, C.block_keys) == length - 1)[:, None]
            k_first = tl.where(is_new, new_first[None, :], k_first)
            k_second = tl.where(is_new, new_second[None, :], k_second)
            v = tl.where(is_new, new_v[None, :], v)
            top, total, acc = _attend(
                q_first, q_second, k_first, k_second, v, start, end, top, total, acc, scale, C
            )
            k_first, k_second, v = _load_keys(
                k_ptr + offset, v_ptr + offset, table_ptr, start + C.block_keys, tl.minimum(end, length - 1),
                block_stride, C,
            )  # fmt: skip
        if (end == length) & (slot >= 0):
            place = (slot // C.block_size) * block_stride + (slot % C.block_size) * C.head_dim + offset
            tl.store(k_ptr + place + half, new_first)
            tl.store(k_ptr + place + C.half + half, new_second)
            tl.store(v_ptr + place + dim, new_v)
        result = acc / total[:, None]
        if num_splits == 1:
            target = out_ptr + head[:, None] * C.head_dim + dim[None, :]
            tl.store(target, result.to(out_ptr.dtype.element_ty), mask=(m < C.group)[:, None])
        else:
            place = (kv_head * C.max_splits + unit // C.num_kv_heads) * C.block_m + m
            is_query = m < C.group
            tl.store(
                partials_ptr + place[:, None] * C.head_dim + dim[None, :], result, mask=is_query[:, None]
            )
            tl.store(log_sums_ptr + place, top + tl.log2(total), mask=is_query)
            tl.debug_barrier()
            if tl.atomic_add(tickets_ptr + kv_head, 1, sem="acq_rel") == num_splits - 1:
                tl.debug_barrier()
                _merge(partials_ptr, log_sums_ptr, kv_head, num_splits, out_ptr, C)
                tl.store(tickets_ptr + kv_head, 0)
        if unit + tl.num_programs(0) < num_splits * C.num_kv_heads:
            k_first, k_second, v = load_unit(
                k_ptr, v_ptr, table_ptr, unit + tl.num_programs(0), length, block_stride, C
            )
