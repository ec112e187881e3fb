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

import triton
import triton.language as tl

from headrace.kernels.triton.decode_stack_attention import attend_units, load_unit
from headrace.kernels.triton.grid_wait import arrive, wait_for
from headrace.kernels.triton.row_product import gated_product, load_tile, product
from headrace.kernels.triton.stack_places import NUM_PLACES, Place

NUM_COLUMNS = tl.constexpr(NUM_PLACES)
_QKV, _BIAS, _OUTPUT, _GATE_UP, _DOWN = (
    tl.constexpr(int(place)) for place in (Place.QKV, Place.BIAS, Place.OUTPUT, Place.GATE_UP, Place.DOWN)
)
_NORM_1, _NORM_2, _Q_NORM, _K_NORM = (
    tl.constexpr(int(place)) for place in (Place.NORM_1, Place.NORM_2, Place.Q_NORM, Place.K_NORM)
)
_K_CACHE, _V_CACHE = tl.constexpr(int(Place.K_CACHE)), tl.constexpr(int(Place.V_CACHE))


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
    tl.store(normed_ptr + col, (x * weight).to(normed_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / C.hidden + eps)
    tl.debug_barrier()
    return scale


@triton.jit
def _place(places_ptr, layer, which):
    """Where a layer's tensor begins, in elements from its base; all tensors are aligned to 16 elements."""
    return tl.multiple_of(tl.load(places_ptr + layer * NUM_COLUMNS + which), 16)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "table_ptr"])
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
    normed_ptr += program * C.hidden
    qkv_tile = load_tile(weights_ptr + _place(places_ptr, 0, _QKV), 0, QKV_S)
    for layer in range(C.num_layers):
        k_ptr = cache_ptr + _place(places_ptr, layer, _K_CACHE)
        v_ptr = cache_ptr + _place(places_ptr, layer, _V_CACHE)
        norm_ptr = norms_ptr + _place(places_ptr, layer, _NORM_1)
        inverse_rms = _norm(residual_ptr, hidden_ptr, spare_ptr, norm_ptr, normed_ptr, eps, C)
        w_ptr, bias_ptr = (
            weights_ptr + _place(places_ptr, layer, _QKV),
            weights_ptr + _place(places_ptr, layer, _BIAS),
        )
        product(qkv_tile, w_ptr, bias_ptr, normed_ptr, inverse_rms, qkv_ptr, QKV_S, C.has_bias)

        arrive(counters_ptr)
        k_first, k_second, v = load_unit(k_ptr, v_ptr, table_ptr, program, length, block_stride, C)
        w_ptr = weights_ptr + _place(places_ptr, layer, _OUTPUT)
        output_tile = load_tile(w_ptr, 0, OUTPUT_S)
        arrivals += num_programs
        wait_for(counters_ptr, arrivals)
        attend_units(
            k_first, k_second, v, qkv_ptr, norms_ptr + _place(places_ptr, layer, _Q_NORM),
            norms_ptr + _place(places_ptr, layer, _K_NORM), k_ptr, v_ptr, table_ptr, cos, sin, length, slot,
            block_stride, scale, eps, partials_ptr, log_sums_ptr, counters_ptr + 1, attended_ptr, C,
        )  # fmt: skip

        arrive(counters_ptr)
        arrivals += num_programs
        wait_for(counters_ptr, arrivals)
        product(output_tile, w_ptr, w_ptr, attended_ptr, 1.0, hidden_ptr, OUTPUT_S, False)

        arrive(counters_ptr)
        w_ptr = weights_ptr + _place(places_ptr, layer, _GATE_UP)
        gate_tile = load_tile(w_ptr, 0, GATE_UP_S)
        up_tile = load_tile(w_ptr + GATE_UP_S.n * GATE_UP_S.k, 0, GATE_UP_S)
        norm_ptr = norms_ptr + _place(places_ptr, layer, _NORM_2)
        arrivals += num_programs
        wait_for(counters_ptr, arrivals)
        inverse_rms = _norm(spare_ptr, hidden_ptr, residual_ptr, norm_ptr, normed_ptr, eps, C)
        gated_product(gate_tile, up_tile, w_ptr, normed_ptr, inverse_rms, act_ptr, GATE_UP_S, C.is_silu)

        arrive(counters_ptr)
        w_ptr = weights_ptr + _place(places_ptr, layer, _DOWN)
        down_tile = load_tile(w_ptr, 0, DOWN_S)
        arrivals += num_programs
        wait_for(counters_ptr, arrivals)
        product(down_tile, w_ptr, w_ptr, act_ptr, 1.0, hidden_ptr, DOWN_S, False)

        arrive(counters_ptr)
        following = tl.minimum(layer + 1, C.num_layers - 1)
        qkv_tile = load_tile(weights_ptr + _place(places_ptr, following, _QKV), 0, QKV_S)
        arrivals += num_programs
        wait_for(counters_ptr, arrivals)
