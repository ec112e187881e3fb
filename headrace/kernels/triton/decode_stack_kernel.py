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
from headrace.kernels.triton.launch import INTERPRETED

IS_INTERPRETED = tl.constexpr(INTERPRETED)
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
    def num_rounds(self) -> int:
        """Rounds of a row."""
        return -(-self.k // self.block_k)

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
    def block_hidden(self) -> int:
        """Hidden size rounded up to a power of two."""
        return 1 << (self.hidden - 1).bit_length()

    @property
    def block_splits(self) -> int:
        """Splits rounded up to a power of two."""
        return 1 << (self.max_splits - 1).bit_length()

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
def _arrive(counter_ptr):
    """Count this program in, after all that it has written; one thread of it does."""
    tl.debug_barrier()
    if IS_INTERPRETED:
        tl.atomic_add(counter_ptr, 1)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_other;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.ne.u32 is_other, thread, 0;
            @!is_other red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l",
            [counter_ptr],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _wait(counter_ptr, target):
    """Until ``target`` arrivals are counted; what those programs wrote before is seen."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_other, is_early;
            .reg .u32 thread, arrived;
            mov.u32 thread, %tid.x;
            setp.ne.u32 is_other, thread, 0;
            @is_other bra finished;
            again:
            ld.acquire.gpu.global.u32 arrived, [$1];
            setp.lt.u32 is_early, arrived, $2;
            @is_early bra again;
            finished:
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [counter_ptr, target],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def _tile_of(index, S: tl.constexpr):
    """(first row, first column) of a program's tile number ``index``; all columns of some rows come in a row."""
    row = (tl.program_id(0) + index // S.num_rounds * tl.num_programs(0)) * S.block_n
    return row, index % S.num_rounds * S.block_k


@triton.jit
def _load_tile(w_ptr, index, S: tl.constexpr):
    """A program's tile number ``index`` [block_n, block_k], zeros outside; read once, so no cache need keep it."""
    first_row, k = _tile_of(index, S)
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
def _multiply(acc, w, x, S: tl.constexpr):
    """acc [block_n, block_k / 8] plus the products of one round, eight of a thread's own at a time."""
    product = tl.reshape(w.to(tl.float32) * x[None, :], [S.block_n, S.block_k // 8, 8])
    return acc + tl.sum(product, axis=2)


@triton.jit
def _norm(x_ptr, added_ptr, sum_ptr, norm_ptr, normed_ptr, eps, C: tl.constexpr):
    """normed = (x + added) * weight, in memory of this program alone; 1 / rms of the sum, which is still to be applied.

    Program 0 stores the sum.
    """
    col = tl.arange(0, C.block_hidden)
    inside = col < C.hidden
    weight = tl.load(norm_ptr + col, mask=inside, other=0.0)
    x = tl.load(x_ptr + col, mask=inside, other=0.0).to(tl.float32)
    x = (x + tl.load(added_ptr + col, mask=inside, other=0.0).to(tl.float32)).to(x_ptr.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(sum_ptr + col, x, mask=inside)
    x = x.to(tl.float32)
    place = normed_ptr + tl.program_id(0) * C.hidden + col
    tl.store(place, (x * weight).to(normed_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / C.hidden + eps)
    tl.debug_barrier()
    return scale


@triton.jit
def _num_tiles(S: tl.constexpr):
    """Tiles of this program."""
    return tl.cdiv(S.num_tiles - tl.program_id(0), tl.num_programs(0)) * S.num_rounds


@triton.jit
def _product(w, w_ptr, bias_ptr, x_ptr, scale, out_ptr, S: tl.constexpr, HAS_BIAS: tl.constexpr):
    """out = scale * W x (+ bias); ``w`` is the first tile."""
    dtype = out_ptr.dtype.element_ty
    acc = tl.full([S.block_n, S.block_k // 8], 0.0, tl.float32)
    for index in range(_num_tiles(S)):
        following = _load_tile(w_ptr, index + 1, S)
        first_row, k = _tile_of(index, S)
        acc = _multiply(acc, w, _load_vector(x_ptr, k, S), S)
        w = following
        if index % S.num_rounds == S.num_rounds - 1:
            row = first_row + tl.arange(0, S.block_n)
            y = tl.sum(acc, axis=1) * scale
            if HAS_BIAS:
                y += tl.load(bias_ptr + row, mask=row < S.n, other=0.0).to(tl.float32)
            tl.store(out_ptr + row, y.to(dtype), mask=row < S.n)
            acc = tl.zeros_like(acc)


@triton.jit
def _gated_product(gate, up, w_ptr, x_ptr, scale, out_ptr, S: tl.constexpr, C: tl.constexpr):
    """out = act(scale * W_gate x) * (scale * W_up x); ``gate`` and ``up`` are the first tiles."""
    dtype = out_ptr.dtype.element_ty
    up_ptr = w_ptr + S.n * S.k
    gate_acc = tl.full([S.block_n, S.block_k // 8], 0.0, tl.float32)
    up_acc = gate_acc
    for index in range(_num_tiles(S)):
        next_gate = _load_tile(w_ptr, index + 1, S)
        next_up = _load_tile(up_ptr, index + 1, S)
        first_row, k = _tile_of(index, S)
        x = _load_vector(x_ptr, k, S)
        gate_acc = _multiply(gate_acc, gate, x, S)
        up_acc = _multiply(up_acc, up, x, S)
        gate, up = next_gate, next_up
        if index % S.num_rounds == S.num_rounds - 1:
            row = first_row + tl.arange(0, S.block_n)
            gated = activate((tl.sum(gate_acc, axis=1) * scale).to(dtype).to(tl.float32), C.is_silu)
            y = gated * (tl.sum(up_acc, axis=1) * scale).to(dtype).to(tl.float32)
            tl.store(out_ptr + row, y.to(dtype), mask=row < S.n)
            gate_acc, up_acc = tl.zeros_like(gate_acc), tl.zeros_like(up_acc)


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
def _load_unit(k_ptr, v_ptr, table_ptr, index, length, block_stride, C: tl.constexpr):
    """The first cached keys and values of a unit; the token's own are not among them."""
    kv_head, first, end, _ = _unit(index, length, C)
    offset = kv_head * C.head_stride
    return _load_keys(
        k_ptr + offset, v_ptr + offset, table_ptr, first, tl.minimum(end, length - 1), block_stride, C
    )


@triton.jit
def _attention(
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
            k_first, k_second, v = _load_unit(
                k_ptr, v_ptr, table_ptr, unit + tl.num_programs(0), length, block_stride, C
            )


@triton.jit
def _place(places_ptr, layer, which):
    """Where a layer's tensor begins, in elements from its base; all tensors are aligned to 16 elements."""
    return tl.multiple_of(tl.load(places_ptr + layer * NUM_COLUMNS + which), 16)


@triton.jit
def decode_stack_kernel(
    residual_ptr, hidden_ptr, spare_ptr, normed_ptr, qkv_ptr, attended_ptr, act_ptr, weights_ptr, norms_ptr,
    cache_ptr, places_ptr, cos_sin_ptr, positions_ptr, slots_ptr, table_ptr, partials_ptr, log_sums_ptr,
    counters_ptr, block_stride, scale, eps,
    C: tl.constexpr, QKV_S: tl.constexpr, OUTPUT_S: tl.constexpr, GATE_UP_S: tl.constexpr, DOWN_S: tl.constexpr,
):  # fmt: skip
    """All layers for one token.

    residual [E] holds the embedding and, in the end, the stream but for the last product, which is in hidden [E],
    zeros at first.  normed: [P, E].  counters: zeros [1 + K]: arrivals, and a ticket for each KV head.
    """
    position, slot = tl.load(positions_ptr), tl.load(slots_ptr)
    length = position.to(tl.int32) + 1
    dim = tl.arange(0, C.half)
    cos = tl.load(cos_sin_ptr + position * C.head_dim + dim)[None, :]
    sin = tl.load(cos_sin_ptr + position * C.head_dim + C.half + dim)[None, :]
    num_programs, program = tl.num_programs(0), tl.program_id(0)
    arrivals = 0
    own_normed_ptr = normed_ptr + program * C.hidden
    qkv_tile = _load_tile(weights_ptr + _place(places_ptr, 0, _QKV), 0, QKV_S)
    for layer in range(C.num_layers):
        k_ptr = cache_ptr + _place(places_ptr, layer, _K_CACHE)
        v_ptr = cache_ptr + _place(places_ptr, layer, _V_CACHE)
        norm_ptr = norms_ptr + _place(places_ptr, layer, _NORM_1)
        inverse_rms = _norm(residual_ptr, hidden_ptr, spare_ptr, norm_ptr, normed_ptr, eps, C)
        w_ptr, bias_ptr = (
            weights_ptr + _place(places_ptr, layer, _QKV),
            weights_ptr + _place(places_ptr, layer, _BIAS),
        )
        _product(qkv_tile, w_ptr, bias_ptr, own_normed_ptr, inverse_rms, qkv_ptr, QKV_S, C.has_bias)

        _arrive(counters_ptr)
        k_first, k_second, v = _load_unit(k_ptr, v_ptr, table_ptr, program, length, block_stride, C)
        w_ptr = weights_ptr + _place(places_ptr, layer, _OUTPUT)
        output_tile = _load_tile(w_ptr, 0, OUTPUT_S)
        arrivals += num_programs
        _wait(counters_ptr, arrivals)
        _attention(
            k_first, k_second, v, qkv_ptr, norms_ptr + _place(places_ptr, layer, _Q_NORM),
            norms_ptr + _place(places_ptr, layer, _K_NORM), k_ptr, v_ptr, table_ptr, cos, sin, length, slot,
            block_stride, scale, eps, partials_ptr, log_sums_ptr, counters_ptr + 1, attended_ptr, C,
        )  # fmt: skip

        _arrive(counters_ptr)
        arrivals += num_programs
        _wait(counters_ptr, arrivals)
        _product(output_tile, w_ptr, w_ptr, attended_ptr, 1.0, hidden_ptr, OUTPUT_S, False)

        _arrive(counters_ptr)
        w_ptr = weights_ptr + _place(places_ptr, layer, _GATE_UP)
        gate_tile = _load_tile(w_ptr, 0, GATE_UP_S)
        up_tile = _load_tile(w_ptr + GATE_UP_S.n * GATE_UP_S.k, 0, GATE_UP_S)
        norm_ptr = norms_ptr + _place(places_ptr, layer, _NORM_2)
        arrivals += num_programs
        _wait(counters_ptr, arrivals)
        inverse_rms = _norm(spare_ptr, hidden_ptr, residual_ptr, norm_ptr, normed_ptr, eps, C)
        _gated_product(gate_tile, up_tile, w_ptr, own_normed_ptr, inverse_rms, act_ptr, GATE_UP_S, C)

        _arrive(counters_ptr)
        w_ptr = weights_ptr + _place(places_ptr, layer, _DOWN)
        down_tile = _load_tile(w_ptr, 0, DOWN_S)
        arrivals += num_programs
        _wait(counters_ptr, arrivals)
        _product(down_tile, w_ptr, w_ptr, act_ptr, 1.0, hidden_ptr, DOWN_S, False)

        _arrive(counters_ptr)
        following = tl.minimum(layer + 1, C.num_layers - 1)
        qkv_tile = _load_tile(weights_ptr + _place(places_ptr, following, _QKV), 0, QKV_S)
        arrivals += num_programs
        _wait(counters_ptr, arrivals)
