"""The decode stack's kernel with its weights in a ring: as ``decode_stack_kernel``, but memory never waits for
programs, and several ranks can add up (``RankExchange``).

Under a stream of weights any other read of memory takes its turn behind all that the ring has asked for, some 5 us. So
what a layer reads besides (its keys and values, norms, places of its tensors) is asked for a product ahead.

Legend: E hidden size, I inner size, H query heads, K KV heads, G = H / K, D head dim, P programs.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.kernels.triton.digits_of_row import make_row, put_row, stage_row
from headrace.kernels.triton.grid_wait import arrive, arrive_anywhere, wait_for, wait_for_all
from headrace.kernels.triton.packed_copies import copy_tiles, make_packed_ring
from headrace.kernels.triton.packed_ring import packed_product
from headrace.kernels.triton.packed_ring_config import COPY_REGISTERS, COPY_WARPS
from headrace.kernels.triton.ring_stack_attention import as_operands, attend_units, load_halves, load_unit
from headrace.kernels.triton.stack_places import NUM_PLACES, Place
from headrace.kernels.triton.weight_ring import (
    FLAT,
    NUM_WARPS,
    advance,
    ask_next,
    count_tiles,
    first_place,
    make_ring,
    product,
)

_NUM_PLACES = gl.constexpr(NUM_PLACES)
_COPY_WARPS, _COPY_REGISTERS = gl.constexpr(COPY_WARPS), gl.constexpr(COPY_REGISTERS)
_K_CACHE, _V_CACHE = gl.constexpr(int(Place.K_CACHE)), gl.constexpr(int(Place.V_CACHE))
_NORM_1, _NORM_2 = gl.constexpr(int(Place.NORM_1)), gl.constexpr(int(Place.NORM_2))
_Q_NORM, _K_NORM = gl.constexpr(int(Place.Q_NORM)), gl.constexpr(int(Place.K_NORM))
_BIAS = gl.constexpr(int(Place.BIAS))
ROW = gl.constexpr(gl.BlockedLayout([8], [32], [NUM_WARPS], [0]))


@gluon.jit
def _pointers(weights_ptr, norms_ptr, cache_ptr, places_ptr, layer):
    """Where a layer's tensors begin: keys, values, bias, first and second norm, norms of queries and keys."""
    row_ptr = places_ptr + layer * _NUM_PLACES
    return (
        cache_ptr + gl.multiple_of(gl.load(row_ptr + _K_CACHE), 16),
        cache_ptr + gl.multiple_of(gl.load(row_ptr + _V_CACHE), 16),
        weights_ptr + gl.multiple_of(gl.load(row_ptr + _BIAS), 16),
        norms_ptr + gl.multiple_of(gl.load(row_ptr + _NORM_1), 16),
        norms_ptr + gl.multiple_of(gl.load(row_ptr + _NORM_2), 16),
        norms_ptr + gl.multiple_of(gl.load(row_ptr + _Q_NORM), 16),
        norms_ptr + gl.multiple_of(gl.load(row_ptr + _K_NORM), 16),
    )


@gluon.jit
def _norm_weight(norm_ptr, C: gl.constexpr):
    """fp32 [E], zeros behind it."""
    col = gl.arange(0, C.block_hidden, layout=ROW)
    return gl.load(norm_ptr + col, mask=col < C.hidden, other=0.0)


@gluon.jit
def _total(part_ptrs, col, inside, SIZE: gl.constexpr):
    """fp32: the sum of the ranks' parts, rounded as one that is stored."""
    total = gl.load(part_ptrs[0] + col, mask=inside, other=0.0).to(gl.float32)
    if SIZE > 1:
        for rank in gl.static_range(1, SIZE):
            total += gl.load(part_ptrs[rank] + col, mask=inside, other=0.0).to(gl.float32)
        total = total.to(part_ptrs[0].dtype.element_ty).to(gl.float32)
    return total


@gluon.jit
def _norm(
    x_ptr, part_ptrs, has_parts, sum_ptr, weight, x_view, eps, C: gl.constexpr, R: gl.constexpr, SIZE: gl.constexpr
):  # fmt: skip
    """x_view = (x + parts) * weight; 1 / rms of the sum, which is still to be applied. Program 0 stores the sum."""
    col = gl.arange(0, C.block_hidden, layout=ROW)
    inside = col < C.hidden
    x = gl.load(x_ptr + col, mask=inside, other=0.0).to(gl.float32)
    x = (x + _total(part_ptrs, col, inside & has_parts, SIZE)).to(x_ptr.dtype.element_ty)
    if gl.program_id(0) == 0:
        gl.store(sum_ptr + col, x, mask=inside)
    x = x.to(gl.float32)
    if R.is_packed:
        put_row(x_view, x * weight, R)
    else:
        x_view.slice(0, C.block_hidden).store((x * weight).to(x_view.dtype))
    return gl.rsqrt(gl.sum(x * x, axis=0) / C.hidden + eps)


@gluon.jit
def _stage(x_ptr, x_view, PART: gl.constexpr, R: gl.constexpr):
    """x_view = the inputs of a product, zeros behind them."""
    if R.is_packed:
        stage_row(x_view, x_ptr, PART, R)
    else:
        LENGTH: gl.constexpr = R.inputs[PART]
        PADDED: gl.constexpr = triton.next_power_of_2(LENGTH)
        col = gl.arange(0, PADDED, layout=ROW)
        x_view.slice(0, PADDED).store(gl.load(x_ptr + col, mask=col < LENGTH, other=0.0))


@gluon.jit
def _addresses(table_ptr, offset, kind: gl.constexpr, SIZE: gl.constexpr):
    """Pointers from a table of addresses, ``offset`` elements on."""
    found = ()
    for rank in gl.static_range(SIZE):
        found = found + (gl.multiple_of(gl.load(table_ptr + rank).to(kind), 16) + offset,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _part_pointers(parts_ptr, hidden_ptr, place, C: gl.constexpr, X: gl.constexpr):
    """(where this rank's part of a sum goes on each rank, where all ranks' parts come to lie on this one)."""
    outs, ours = (hidden_ptr,), (hidden_ptr,)
    if X.size > 1:
        kind: gl.constexpr = hidden_ptr.dtype
        SIZE: gl.constexpr = X.size
        own = gl.multiple_of(gl.load(parts_ptr + X.rank).to(kind), 16) + place * SIZE * C.hidden
        outs = _addresses(parts_ptr, (place * SIZE + X.rank) * C.hidden, kind, SIZE)
        ours = ()  # type: ignore[assignment]
        for rank in gl.static_range(SIZE):
            ours = ours + (own + rank * C.hidden,)  # type: ignore[assignment]  # noqa: RUF005
    return outs, ours


@gluon.jit
def _fill(weights_ptr, places_ptr, counts, dtype: gl.constexpr, C: gl.constexpr, R: gl.constexpr):
    """The ring with all its tiles asked for, and the place of the next."""
    ring = make_ring(dtype, R)
    place = first_place(gl.program_id(0) * 0, places_ptr, C)
    for _ in range(R.num_slots):
        ask_next(ring, place, weights_ptr, C, R)
        place = advance(place, counts, places_ptr, C, R)
    return ring, place


@gluon.jit
def _product(
    flow, slot, place, scale, bias_ptr, out_ptrs, PART: gl.constexpr, NUM_OUTS: gl.constexpr, C: gl.constexpr,
    R: gl.constexpr,
):  # fmt: skip
    """As ``weight_ring.product``, of either kind of weights."""
    if R.is_packed:
        slot, place = packed_product(flow, slot, place, scale, out_ptrs, PART, NUM_OUTS, C, R)
    else:
        slot, place = product(flow, slot, place, scale, bias_ptr, out_ptrs, PART, NUM_OUTS, C, R)
    return slot, place


@gluon.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "table_ptr"])
def ring_stack_kernel(
    residual_ptr, hidden_ptr, spare_ptr, qkv_ptr, attended_ptr, act_ptr, weights_ptr, norms_ptr,
    cache_ptr, places_ptr, cos_sin_ptr, positions_ptr, slots_ptr, table_ptr, partials_ptr, log_sums_ptr,
    counters_ptr, parts_ptr, arrivals_ptr, block_stride, scale, eps, C: gl.constexpr, R: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """All layers for one token.

    residual [E] holds the embedding and, in the end, the stream but for the last product, which is in hidden [E].
    counters: [3 + K]: this device's arrivals, what they and those of all ranks were before, a ticket for each KV head.
    parts, arrivals: [ranks] int64, addresses of each rank's [2, ranks, E] numbers and arrivals (``RankExchange``).
    """
    vectors = (residual_ptr, hidden_ptr, spare_ptr, qkv_ptr, attended_ptr, act_ptr)
    model = (weights_ptr, norms_ptr, cache_ptr, places_ptr, cos_sin_ptr)
    token = (positions_ptr, slots_ptr, table_ptr, block_stride, scale, eps)
    shared = (partials_ptr, log_sums_ptr, counters_ptr, parts_ptr, arrivals_ptr)
    if R.is_packed:
        ring, row = make_packed_ring(R), make_row(R)
        gl.warp_specialize(
            [
                (_layers, (vectors, model, token, shared, ring, row, C, R, X)),
                (copy_tiles, (ring, weights_ptr, places_ptr, C, R)),
            ],
            [_COPY_WARPS],
            [_COPY_REGISTERS],
        )
    else:
        x_view = gl.allocate_shared_memory(residual_ptr.dtype.element_ty, [R.block_inputs], FLAT)
        _layers(vectors, model, token, shared, x_view, x_view, C, R, X)


@gluon.jit
def _layers(vectors, model, token, shared, ring, x_view, C: gl.constexpr, R: gl.constexpr, X: gl.constexpr):
    """ring: where others fill it."""
    residual_ptr, hidden_ptr, spare_ptr, qkv_ptr, attended_ptr, act_ptr = vectors
    weights_ptr, norms_ptr, cache_ptr, places_ptr, cos_sin_ptr = model
    positions_ptr, slots_ptr, table_ptr, block_stride, scale, eps = token
    partials_ptr, log_sums_ptr, counters_ptr, parts_ptr, arrivals_ptr = shared
    position, slot = gl.load(positions_ptr), gl.load(slots_ptr)
    length = position.to(gl.int32) + 1
    cos, sin = load_halves(cos_sin_ptr + position * C.head_dim, C)
    num_programs, program = gl.num_programs(0), gl.program_id(0)
    arrived, all_arrived = gl.load(counters_ptr + 1), gl.load(counters_ptr + 2)
    tickets_ptr = counters_ptr + 3
    first_outs, first_parts = _part_pointers(parts_ptr, hidden_ptr, 0, C, X)
    second_outs, second_parts = _part_pointers(parts_ptr, hidden_ptr, 1, C, X)
    all_counters = _addresses(arrivals_ptr, 0, counters_ptr.dtype, X.size)
    dtype: gl.constexpr = residual_ptr.dtype.element_ty
    taken = program * 0
    if R.is_packed:
        flow, place = (ring, x_view), taken
    else:
        counts = (count_tiles(0, R), count_tiles(1, R), count_tiles(2, R), count_tiles(3, R))
        ring, place = _fill(weights_ptr, places_ptr, counts, dtype, C, R)
        flow = (ring, x_view, counts, weights_ptr, places_ptr)  # type: ignore[assignment]
    k_ptr, v_ptr, bias_ptr, norm_1, norm_2, q_norm, k_norm = _pointers(
        weights_ptr, norms_ptr, cache_ptr, places_ptr, 0
    )
    weight = _norm_weight(norm_1, C)
    for layer in range(C.num_layers):
        k_first, k_second, v = load_unit(k_ptr, v_ptr, table_ptr, program, length, block_stride, C)
        norms = (cos, cos, cos, cos)
        if C.has_qk_norm:
            q_1, q_2 = load_halves(q_norm, C)
            k_1, k_2 = load_halves(k_norm, C)
            norms = (q_1, q_2, k_1, k_2)
        inverse_rms = _norm(
            residual_ptr, second_parts, layer > 0, spare_ptr, weight, x_view, eps, C, R, X.size
        )
        weight = _norm_weight(norm_2, C)
        taken, place = _product(flow, taken, place, inverse_rms, bias_ptr, (qkv_ptr,), 0, 1, C, R)

        arrive(counters_ptr)
        k_first, k_second, v = as_operands(k_first, k_second, v)
        arrived += num_programs
        wait_for(counters_ptr, arrived)
        attend_units(
            k_first, k_second, v, qkv_ptr, norms, k_ptr, v_ptr, table_ptr, cos, sin, length, slot, block_stride, scale,
            eps, partials_ptr, log_sums_ptr, tickets_ptr, attended_ptr, C,
        )  # fmt: skip

        arrive(counters_ptr)
        arrived += num_programs
        wait_for(counters_ptr, arrived)
        _stage(attended_ptr, x_view, 1, R)
        taken, place = _product(flow, taken, place, 1.0, bias_ptr, first_outs, 1, X.size, C, R)

        arrived, all_arrived = _meet(counters_ptr, all_counters, arrived, all_arrived, X)
        inverse_rms = _norm(spare_ptr, first_parts, True, residual_ptr, weight, x_view, eps, C, R, X.size)
        k_ptr, v_ptr, bias_ptr, norm_1, norm_2, q_norm, k_norm = _pointers(
            weights_ptr, norms_ptr, cache_ptr, places_ptr, gl.minimum(layer + 1, C.num_layers - 1)
        )
        taken, place = _product(flow, taken, place, inverse_rms, bias_ptr, (act_ptr,), 2, 1, C, R)

        arrive(counters_ptr)
        arrived += num_programs
        wait_for(counters_ptr, arrived)
        _stage(act_ptr, x_view, 3, R)
        weight = _norm_weight(norm_1, C)
        taken, place = _product(flow, taken, place, 1.0, bias_ptr, second_outs, 3, X.size, C, R)

        arrived, all_arrived = _meet(counters_ptr, all_counters, arrived, all_arrived, X)
    if program == 0:
        _finish(counters_ptr, arrived, all_arrived, second_parts, hidden_ptr, C, X.size)


@gluon.jit
def _finish(counters_ptr, arrived, all_arrived, part_ptrs, hidden_ptr, C: gl.constexpr, SIZE: gl.constexpr):
    """Where the next launch counts on; the last sum in ``hidden``."""
    gl.store(counters_ptr + 1, arrived)
    gl.store(counters_ptr + 2, all_arrived)
    if SIZE > 1:
        col = gl.arange(0, C.block_hidden, layout=ROW)
        inside = col < C.hidden
        total = _total(part_ptrs, col, inside, SIZE)
        gl.store(hidden_ptr + col, total.to(hidden_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _meet(counters_ptr, all_counters, arrived, all_arrived, X: gl.constexpr):
    """Wait until the parts of a sum are there; the arrivals on this device and on all ranks from now on."""
    if X.size == 1:
        arrive(counters_ptr)
        arrived += gl.num_programs(0)
        wait_for(counters_ptr, arrived)
    else:
        SIZE: gl.constexpr = X.size
        for rank in gl.static_range(SIZE):
            arrive_anywhere(all_counters[rank])
        all_arrived += X.size * gl.num_programs(0)
        wait_for_all(all_counters[X.rank], all_arrived)
    return arrived, all_arrived
