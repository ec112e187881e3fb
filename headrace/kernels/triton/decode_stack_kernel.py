"""One persistent kernel for all layers of one token: the grid waits for itself between the parts of a layer.

With one row the work of a layer is reading its weights, a few microseconds; ten launches a layer cost as much again.
Here each program reads its share of every matrix, asks for the first bytes of the next one before it waits for the
others, and only small vectors pass between programs. The parts of a layer:

1. norm, query-key-value product      2. query and key norms, rotation, K and V into the cache, attention by splits
3. output product                     4. norm, gate and up products, activation      5. down product

Every program adds and normalises the residual stream for itself; program 0 stores the sum, in a buffer that nobody
reads before the next wait. Roundings are those of the ops that it stands for.

Legend: E hidden size, I inner size, H query heads, K KV heads, G = H / K, D head dim, P programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from headrace.kernels.triton.activation import activate

HIDDEN = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Share:
    """How the programs divide a matrix [n, k].

    block_n: rows of a program's tile (pairs of rows where two matrices are gated); tiles go round the programs.
    block_k: columns of one round.
    """

    n: int
    k: int
    block_n: int
    block_k: int

    @property
    def is_even(self) -> bool:
        """Whether all rounds are whole."""
        return self.k % self.block_k == 0

    @property
    def num_tiles(self) -> int:
        """Tiles of the matrix."""
        return -(-self.n // self.block_n)


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What the kernel is compiled for."""

    num_layers: int
    hidden: int
    block_hidden: int
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

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def half(self) -> int:
        """Half a head."""
        return self.head_dim // 2

    @property
    def head_stride(self) -> int:
        """Elements from one KV head of a block to the next."""
        return self.block_size * self.head_dim


# Rows of the table of places: elements from a base to each layer's own tensor.
QKV, BIAS, OUTPUT, GATE_UP, DOWN, NORM_1, NORM_2, Q_NORM, K_NORM, K_CACHE, V_CACHE = range(11)
NUM_PLACES = 11
NUM_COLUMNS = tl.constexpr(NUM_PLACES)
_QKV, _BIAS, _OUTPUT, _GATE_UP, _DOWN = (tl.constexpr(value) for value in (QKV, BIAS, OUTPUT, GATE_UP, DOWN))
_NORM_1, _NORM_2, _Q_NORM, _K_NORM = (tl.constexpr(value) for value in (NORM_1, NORM_2, Q_NORM, K_NORM))
_K_CACHE, _V_CACHE = (tl.constexpr(value) for value in (K_CACHE, V_CACHE))


@triton.jit
def _wait_for_all(counter_ptr, target):
    """Until all programs have come here so often that ``target`` arrivals are counted; what they wrote is seen."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while arrived < target:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _load_weights(w_ptr, first_row, k, S: tl.constexpr):
    """[block_n, block_k] of a matrix, zeros outside; read once, so it need not stay in the caches."""
    row = first_row + tl.arange(0, S.block_n)
    col = k + tl.arange(0, S.block_k)
    inside = (row < S.n)[:, None]
    if not S.is_even:
        inside = inside & (col < S.k)[None, :]
    return tl.load(
        w_ptr + row.to(tl.int64)[:, None] * S.k + col[None, :],
        mask=inside,
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def _load_vector(x_ptr, k, S: tl.constexpr):
    """fp32 columns [k, k + block_k)."""
    col = k + tl.arange(0, S.block_k)
    if S.is_even:
        return tl.load(x_ptr + col).to(tl.float32)
    else:
        return tl.load(x_ptr + col, mask=col < S.k, other=0.0).to(tl.float32)


@triton.jit
def _load_sum(x_ptr, added_ptr, has_added, k, S: tl.constexpr):
    """fp32 columns of x plus what a product added, rounded as the residual stream is."""
    x = _load_vector(x_ptr, k, S)
    if has_added:
        x = (x + _load_vector(added_ptr, k, S)).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _multiply(acc, w, x, S: tl.constexpr):
    """acc [block_n, block_k / 8] plus the products of one round, eight of a thread's own at a time."""
    product = tl.reshape(w.to(tl.float32) * x[None, :], [S.block_n, S.block_k // 8, 8])
    return acc + tl.sum(product, axis=2)


@triton.jit
def _inverse_rms(x_ptr, added_ptr, has_added, sum_ptr, eps, C: tl.constexpr):
    """1 / sqrt(mean((x + added)^2) + eps); program 0 stores the sum."""
    col = tl.arange(0, C.block_hidden)
    inside = col < C.hidden
    x = tl.load(x_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if has_added:
        added = tl.load(added_ptr + col, mask=inside, other=0.0).to(tl.float32)
        x = (x + added).to(x_ptr.dtype.element_ty).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(sum_ptr + col, x.to(sum_ptr.dtype.element_ty), mask=inside)
    return tl.rsqrt(tl.sum(x * x, axis=0) / C.hidden + eps)


@triton.jit
def _normed_product(
    w,
    w_ptr,
    bias_ptr,
    norm_ptr,
    x_ptr,
    added_ptr,
    has_added,
    scale,
    out_ptr,
    S: tl.constexpr,
    C: tl.constexpr,
):
    """out = W norm(x + added) (+ bias); ``w`` is the first tile's first round, loaded already."""
    dtype = out_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), S.num_tiles, tl.num_programs(0)):
        first_row = tile * S.block_n
        acc = tl.full([S.block_n, S.block_k // 8], 0.0, tl.float32)
        for k in range(0, S.k, S.block_k):
            is_last = k + S.block_k >= S.k
            next_row = tl.where(is_last, first_row + tl.num_programs(0) * S.block_n, first_row)
            following = _load_weights(w_ptr, next_row, tl.where(is_last, 0, k + S.block_k), S)
            x = _load_sum(x_ptr, added_ptr, has_added, k, S)
            x = (x * scale * _load_vector(norm_ptr, k, S)).to(dtype).to(tl.float32)
            acc = _multiply(acc, w, x, S)
            w = following
        row = first_row + tl.arange(0, S.block_n)
        y = tl.sum(acc, axis=1)
        if C.has_bias:
            y += tl.load(bias_ptr + row, mask=row < S.n, other=0.0).to(tl.float32)
        tl.store(out_ptr + row, y.to(dtype), mask=row < S.n)


@triton.jit
def _gated_product(
    gate, up, w_ptr, norm_ptr, x_ptr, added_ptr, scale, out_ptr, S: tl.constexpr, C: tl.constexpr
):
    """out = act(W_gate norm(x + added)) * (W_up norm(x + added)); ``gate`` and ``up`` are loaded already."""
    dtype = out_ptr.dtype.element_ty
    up_ptr = w_ptr + S.n * S.k
    for tile in range(tl.program_id(0), S.num_tiles, tl.num_programs(0)):
        first_row = tile * S.block_n
        gate_acc = tl.full([S.block_n, S.block_k // 8], 0.0, tl.float32)
        up_acc = gate_acc
        for k in range(0, S.k, S.block_k):
            is_last = k + S.block_k >= S.k
            next_row = tl.where(is_last, first_row + tl.num_programs(0) * S.block_n, first_row)
            next_k = tl.where(is_last, 0, k + S.block_k)
            next_gate = _load_weights(w_ptr, next_row, next_k, S)
            next_up = _load_weights(up_ptr, next_row, next_k, S)
            x = _load_sum(x_ptr, added_ptr, True, k, S)
            x = (x * scale * _load_vector(norm_ptr, k, S)).to(dtype).to(tl.float32)
            gate_acc = _multiply(gate_acc, gate, x, S)
            up_acc = _multiply(up_acc, up, x, S)
            gate, up = next_gate, next_up
        row = first_row + tl.arange(0, S.block_n)
        gated = activate(tl.sum(gate_acc, axis=1).to(dtype).to(tl.float32), C.is_silu)
        y = gated * tl.sum(up_acc, axis=1).to(dtype).to(tl.float32)
        tl.store(out_ptr + row, y.to(dtype), mask=row < S.n)


@triton.jit
def _product(w, w_ptr, x_ptr, out_ptr, S: tl.constexpr):
    """out = W x; ``w`` is the first tile's first round, loaded already."""
    dtype = out_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), S.num_tiles, tl.num_programs(0)):
        first_row = tile * S.block_n
        acc = tl.full([S.block_n, S.block_k // 8], 0.0, tl.float32)
        for k in range(0, S.k, S.block_k):
            is_last = k + S.block_k >= S.k
            next_row = tl.where(is_last, first_row + tl.num_programs(0) * S.block_n, first_row)
            following = _load_weights(w_ptr, next_row, tl.where(is_last, 0, k + S.block_k), S)
            acc = _multiply(acc, w, _load_vector(x_ptr, k, S), S)
            w = following
        row = first_row + tl.arange(0, S.block_n)
        tl.store(out_ptr + row, tl.sum(acc, axis=1).to(dtype), mask=row < S.n)


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
def _store_new(qkv_ptr, norm_ptr, k_ptr, v_ptr, kv_head, slot, block_stride, cos, sin, eps, C: tl.constexpr):
    """The token's own K and V of one head into their slot, unless that is negative."""
    lane = tl.arange(0, C.block_m)
    is_first = lane == 0
    head = C.num_heads + kv_head + lane * 0
    first, second = _rotated(qkv_ptr, norm_ptr, head, is_first, cos, sin, eps, C)
    dim = tl.arange(0, C.half)
    place = (
        (slot // C.block_size) * block_stride + (slot % C.block_size) * C.head_dim + kv_head * C.head_stride
    )
    mask = (is_first & (slot >= 0))[:, None] & (dim >= 0)[None, :]
    target = k_ptr + place + dim[None, :] + lane[:, None] * 0
    tl.store(target, first, mask=mask)
    tl.store(target + C.half, second, mask=mask)
    all_dims = tl.arange(0, C.head_dim)
    value = tl.load(qkv_ptr + (C.num_heads + C.num_kv_heads + kv_head) * C.head_dim + all_dims)
    tl.store(v_ptr + place + all_dims, value, mask=(all_dims >= 0) & (slot >= 0))


@triton.jit
def _attend(q_first, q_second, k_ptr, v_ptr, table_ptr, start, end, block_stride, scale, C: tl.constexpr):
    """(top [M], total [M], acc [M, D]): the online softmax over keys [start, end)."""
    half, dim, lane = tl.arange(0, C.half), tl.arange(0, C.head_dim), tl.arange(0, C.block_keys)
    top = tl.full([C.block_m], HIDDEN, tl.float32)
    total = tl.full([C.block_m], 0.0, tl.float32)
    acc = tl.full([C.block_m, C.head_dim], 0.0, tl.float32)
    for first in tl.range(start, end, C.block_keys, num_stages=2):
        key = first + lane
        is_key = key < end
        block = tl.load(table_ptr + key // C.block_size, mask=is_key, other=0).to(tl.int64)
        place = block * block_stride + (key % C.block_size) * C.head_dim
        k_place = k_ptr + place[:, None] + half[None, :]
        k_first = tl.load(k_place, mask=is_key[:, None], other=0.0)
        k_second = tl.load(k_place + C.half, mask=is_key[:, None], other=0.0)
        v = tl.load(v_ptr + place[:, None] + dim[None, :], mask=is_key[:, None], other=0.0)
        score = tl.dot(q_first, tl.trans(k_first))
        score = tl.dot(q_second, tl.trans(k_second), score) * (scale * LOG2_E)
        score = tl.where(is_key[None, :], score, HIDDEN)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return top, total, acc


@triton.jit
def _merge(partials_ptr, log_sums_ptr, kv_head, num_splits, out_ptr, C: tl.constexpr):
    """The splits of one KV head's queries, weighted by their share of the whole sum, in order."""
    m, dim = tl.arange(0, C.block_m), tl.arange(0, C.head_dim)
    top = tl.full([C.block_m], HIDDEN, tl.float32)
    total = tl.full([C.block_m], 0.0, tl.float32)
    acc = tl.full([C.block_m, C.head_dim], 0.0, tl.float32)
    for split in range(num_splits):
        slot = (kv_head * C.max_splits + split) * C.block_m + m
        log_sum = tl.load(log_sums_ptr + slot)
        part = tl.load(partials_ptr + slot[:, None] * C.head_dim + dim[None, :])
        new_top = tl.maximum(top, log_sum)
        weight, shrink = tl.exp2(log_sum - new_top), tl.exp2(top - new_top)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        top = new_top
    place = out_ptr + (kv_head * C.group + m)[:, None] * C.head_dim + dim[None, :]
    tl.store(place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(m < C.group)[:, None])


@triton.jit
def _attention(
    qkv_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr, table_ptr, cos_sin_ptr, position, slot, block_stride, scale,
    eps, partials_ptr, log_sums_ptr, tickets_ptr, out_ptr, C: tl.constexpr,
):  # fmt: skip
    """Attention of the token's queries over its cache and itself; the last program of a KV head merges its splits."""
    dim, m = tl.arange(0, C.half), tl.arange(0, C.block_m)
    cos = tl.load(cos_sin_ptr + position * C.head_dim + dim)[None, :]
    sin = tl.load(cos_sin_ptr + position * C.head_dim + C.half + dim)[None, :]
    length = position.to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(length, C.max_splits), C.block_keys) * C.block_keys
    num_splits = tl.cdiv(length, share)
    for unit in range(tl.program_id(0), num_splits * C.num_kv_heads, tl.num_programs(0)):
        kv_head, split = unit % C.num_kv_heads, unit // C.num_kv_heads
        if split == num_splits - 1:
            _store_new(qkv_ptr, k_norm_ptr, k_ptr, v_ptr, kv_head, slot, block_stride, cos, sin, eps, C)
            tl.debug_barrier()
        head = kv_head * C.group + m
        q_first, q_second = _rotated(qkv_ptr, q_norm_ptr, head, m < C.group, cos, sin, eps, C)
        top, total, acc = _attend(
            q_first, q_second, k_ptr + kv_head * C.head_stride, v_ptr + kv_head * C.head_stride, table_ptr,
            split * share, tl.minimum((split + 1) * share, length), block_stride, scale, C,
        )  # fmt: skip
        place = (kv_head * C.max_splits + split) * C.block_m + m
        all_dims = tl.arange(0, C.head_dim)
        tl.store(partials_ptr + place[:, None] * C.head_dim + all_dims[None, :], acc / total[:, None])
        tl.store(log_sums_ptr + place, top + tl.log2(total))
        tl.debug_barrier()
        if tl.atomic_add(tickets_ptr + kv_head, 1, sem="acq_rel") == num_splits - 1:
            tl.debug_barrier()
            _merge(partials_ptr, log_sums_ptr, kv_head, num_splits, out_ptr, C)
            tl.store(tickets_ptr + kv_head, 0)


@triton.jit
def _place(places_ptr, layer, which):
    """Where a layer's tensor begins, in elements from its base; all tensors are aligned to 16 elements."""
    return tl.multiple_of(tl.load(places_ptr + layer * NUM_COLUMNS + which), 16)


@triton.jit(do_not_specialize=["block_stride"])
def decode_stack_kernel(
    residual_ptr, hidden_ptr, spare_ptr, qkv_ptr, attended_ptr, act_ptr, weights_ptr, norms_ptr, cache_ptr,
    places_ptr, cos_sin_ptr, positions_ptr, slots_ptr, table_ptr, partials_ptr, log_sums_ptr, counters_ptr,
    block_stride, scale, eps,
    C: tl.constexpr, QKV_S: tl.constexpr, OUTPUT_S: tl.constexpr, GATE_UP_S: tl.constexpr, DOWN_S: tl.constexpr,
):  # fmt: skip
    """All layers for one token.

    residual [E] holds the embedding and, in the end, the stream but for the last product, which is in hidden [E].
    counters: zeros [1 + K]: arrivals, and a ticket for each KV head.
    """
    position = tl.load(positions_ptr)
    slot = tl.load(slots_ptr)
    num_programs = tl.num_programs(0)
    arrivals = 0
    first = tl.program_id(0)
    w_ptr = weights_ptr + _place(places_ptr, 0, _QKV)
    qkv_tile = _load_weights(w_ptr, first * QKV_S.block_n, 0, QKV_S)
    for layer in range(C.num_layers):
        w_ptr = weights_ptr + _place(places_ptr, layer, _QKV)
        has_added = layer > 0
        scale_1 = _inverse_rms(residual_ptr, hidden_ptr, has_added, spare_ptr, eps, C)
        _normed_product(
            qkv_tile, w_ptr, weights_ptr + _place(places_ptr, layer, _BIAS),
            norms_ptr + _place(places_ptr, layer, _NORM_1), residual_ptr, hidden_ptr, has_added, scale_1, qkv_ptr,
            QKV_S, C,
        )  # fmt: skip
        w_ptr = weights_ptr + _place(places_ptr, layer, _OUTPUT)
        output_tile = _load_weights(w_ptr, first * OUTPUT_S.block_n, 0, OUTPUT_S)
        arrivals += num_programs
        _wait_for_all(counters_ptr, arrivals)
        _attention(
            qkv_ptr, norms_ptr + _place(places_ptr, layer, _Q_NORM), norms_ptr + _place(places_ptr, layer, _K_NORM),
            cache_ptr + _place(places_ptr, layer, _K_CACHE), cache_ptr + _place(places_ptr, layer, _V_CACHE),
            table_ptr, cos_sin_ptr, position, slot, block_stride, scale, eps, partials_ptr, log_sums_ptr,
            counters_ptr + 1, attended_ptr, C,
        )  # fmt: skip
        arrivals += num_programs
        _wait_for_all(counters_ptr, arrivals)
        _product(output_tile, w_ptr, attended_ptr, hidden_ptr, OUTPUT_S)
        w_ptr = weights_ptr + _place(places_ptr, layer, _GATE_UP)
        gate_tile = _load_weights(w_ptr, first * GATE_UP_S.block_n, 0, GATE_UP_S)
        up_tile = _load_weights(w_ptr + GATE_UP_S.n * GATE_UP_S.k, first * GATE_UP_S.block_n, 0, GATE_UP_S)
        arrivals += num_programs
        _wait_for_all(counters_ptr, arrivals)
        scale_2 = _inverse_rms(spare_ptr, hidden_ptr, True, residual_ptr, eps, C)
        _gated_product(
            gate_tile, up_tile, w_ptr, norms_ptr + _place(places_ptr, layer, _NORM_2), spare_ptr, hidden_ptr,
            scale_2, act_ptr, GATE_UP_S, C,
        )  # fmt: skip
        w_ptr = weights_ptr + _place(places_ptr, layer, _DOWN)
        down_tile = _load_weights(w_ptr, first * DOWN_S.block_n, 0, DOWN_S)
        arrivals += num_programs
        _wait_for_all(counters_ptr, arrivals)
        _product(down_tile, w_ptr, act_ptr, hidden_ptr, DOWN_S)
        following = weights_ptr + _place(places_ptr, tl.minimum(layer + 1, C.num_layers - 1), _QKV)
        qkv_tile = _load_weights(following, first * QKV_S.block_n, 0, QKV_S)
        arrivals += num_programs
        _wait_for_all(counters_ptr, arrivals)
