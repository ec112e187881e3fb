"""attention over a plan's work list; see kernels/reference/attention.py."""

from __future__ import annotations

import ctypes

import torch

from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.rope_and_store import cache_args
from headrace.kernels.native.run import check_rows
from headrace.kernels.native.structs import DTYPES, AttentionArgs, AttentionPlanArgs
from headrace.kernels.quantized_cache import QuantizedCache
from headrace.kernels.reference.attention_items import AttentionWork

_INDICES = (
    "query_rows",
    "row_positions",
    "item_request",
    "item_kv_start",
    "item_kv_end",
    "item_row_start",
    "item_num_rows",
    "item_partial_start",
    "reduce_rows",
    "reduce_starts",
    "reduce_slots",
)


@native_op(lambda qkv, k_cache, v_cache, plan, out, *_, **__: plan.num_items * out.shape[1] * 256)
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
) -> AttentionArgs:
    """See the reference. A row's result is bitwise the same in any company, as long as its own request brings the
    same query tokens and nothing is shared. In bf16 with AMX, without a window, two query tokens or more of them give
    what all of them give."""
    check_rows(qkv=qkv, out=out)
    keys, values = cache_args(k_cache), cache_args(v_cache)
    assert keys.words or keys.type == values.type
    return AttentionArgs(
        rows=qkv.shape[0],
        qkv=qkv.data_ptr(),
        plan=plan_address(plan, num_heads, head_dim),
        out=out.data_ptr(),
        keys=keys,
        values=values,
        qkv_stride=qkv.stride(0),
        out_stride=out.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        soft_cap=soft_cap or 0.0,
        dtype=DTYPES[qkv.dtype],
        out_dtype=DTYPES[out.dtype],
    )


def plan_address(plan: AttentionWork, num_heads: int, head_dim: int) -> int:
    """Where the plan's struct is, which lives as long as the plan and is shared by all layers of these heads.

    The plan's block table may have become another one since.
    """
    key = ("native", num_heads, head_dim)
    kept = plan.derived.get(key)
    if kept is None:
        partials = torch.empty((plan.num_partials, num_heads, head_dim), dtype=torch.float32, device="cpu")
        log_sums = torch.empty((plan.num_partials, num_heads), dtype=torch.float32, device="cpu")
        kept = plan.derived[key] = (_plan_args(plan, partials, log_sums), partials, log_sums)
    args = kept[0]
    args.block_table, args.block_table_stride = plan.block_table.data_ptr(), plan.block_table.stride(0)
    return ctypes.addressof(args)


def _plan_args(plan: AttentionWork, partials: torch.Tensor, log_sums: torch.Tensor) -> AttentionPlanArgs:
    tensors = {name: getattr(plan, name) for name in _INDICES}
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), name
    table = plan.block_table
    check_rows(block_table=table)
    assert table.dtype == torch.int32
    return AttentionPlanArgs(
        num_items=plan.num_items,
        num_reductions=plan.num_reductions,
        block_table=table.data_ptr(),
        block_table_stride=table.stride(0),
        block_size=plan.block_size,
        window=plan.window or 0,
        partials=partials.data_ptr(),
        log_sums=log_sums.data_ptr(),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
