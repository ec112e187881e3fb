"""attention: paged attention over a plan's work list.

FlashDecoding (Dao et al.) for short tiles, FlashAttention 2 for long ones, or 3 on Hopper, all over paged blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from headrace.kernels.quantized_cache import QuantizedCache
from headrace.kernels.triton.attention_codes import coded_tiles_kernel
from headrace.kernels.triton.attention_common import TileConfig
from headrace.kernels.triton.attention_hopper_tiles import HOPPER_LAUNCH, launch_hopper, takes_hopper
from headrace.kernels.triton.attention_kernels import (
    long_tiles_kernel,
    merge_kernel,
    short_tiles_kernel,
)
from headrace.kernels.triton.attention_ring import coded_ring_kernel
from headrace.kernels.triton.attention_ring_tiles import ring_launch, takes_ring
from headrace.kernels.triton.attention_tiles import LaunchShape, long_launch, short_launch
from headrace.kernels.triton.attention_work import AttentionWork, PackedWork, TileRows, pack_plan
from headrace.kernels.triton.launch import INTERPRETED, launch_options, num_multiprocessors
from headrace.kernels.triton.library_attention import LIBRARY_KEY
from headrace.kernels.triton.quantized_cache import PAIRED_KINDS, cache_arguments, cache_geometry

WORK_KEY = "triton"
"""Where a plan's ``derived`` holds its ``PackedWork``."""

_FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
_MERGED_AT_ONCE = 8
_MERGES_PER_MULTIPROCESSOR = 16


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
    """See ``headrace.kernels.reference.attention.attention``.

    K and V have the strides of ``KVCacheLayout``: within a block, heads, slots and dims are contiguous. A row's
    result depends on the other requests of the step only by where ``SplitRule`` cuts its keys and, in its rounding,
    by how many short items there are (``short_launch``).
    """
    k_codes, k_scales, k_kind, _ = cache_arguments(k_cache)
    v_codes, v_scales, v_kind, _ = cache_arguments(v_cache)
    block_size = k_codes.shape[2]
    for codes in (k_codes, v_codes):
        assert codes.stride()[2:] == (codes.shape[3], 1) and codes.stride(0) == k_codes.stride(0)
        assert k_kind or codes.stride(1) == block_size * head_dim
    if LIBRARY_KEY in plan.derived:
        plan.derived[LIBRARY_KEY].run(qkv, k_codes, v_codes, plan.block_table, out, scale)
    work = plan.derived.get(WORK_KEY)
    if work is None:
        work = plan.derived[WORK_KEY] = pack_plan(plan, num_heads // num_kv_heads)
    if work.num_short + work.num_long == 0 and not work.is_fixed:
        return
    partials, log_sums = work.partials(num_heads, head_dim)
    strides = (qkv.stride(0), out.stride(0), plan.block_table.stride(0), k_codes.stride(0))
    tensors = (qkv, k_codes, v_codes, out, partials, log_sums, plan.block_table, work.buffer)
    arguments = (*tensors, *strides, scale, soft_cap or 0.0, plan.window or 0)
    shape = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_d": triton.next_power_of_2(head_dim),
        "block_size": block_size,
        "has_window": plan.window is not None,
        "has_soft_cap": soft_cap is not None,
        "precision": "ieee" if qkv.dtype == torch.float32 else "tf32",
        **cache_geometry((k_codes, k_scales), (v_codes, v_scales), (k_kind, v_kind)),
    }
    # pairs of fp16 are counted as one by the kernels
    pair = 2 if k_kind in PAIRED_KINDS else 1
    scales = {
        "k_scales_ptr": k_scales,
        "v_scales_ptr": v_scales,
        "scales_stride": k_scales.stride(0) // pair,
    }
    if work.num_long:
        _run_long(arguments, scales, shape, work, qkv.dtype)
    if work.num_short or work.is_fixed:
        _run_short(arguments, scales, shape, work, qkv.dtype)
    if work.num_reductions or work.is_fixed:
        _merge(work, partials, log_sums, out, num_heads, head_dim)


def _run_short(
    arguments: tuple[Any, ...],
    scales: dict[str, Any],
    shape: dict[str, Any],
    work: PackedWork,
    dtype: torch.dtype,
) -> None:
    group = shape["num_heads"] // shape["num_kv_heads"]
    is_coded = _is_coded(shape, dtype)
    is_quantized, num_units = "kv_kind" in shape, work.num_short * shape["num_kv_heads"]
    # not items: few long contexts in many parts are best served as few; and a graph serves steps of other mixtures
    row_units = len(arguments[0]) * shape["num_kv_heads"]
    if is_coded and takes_ring(shape):
        launch = ring_launch(row_units)
        options = {**scales, "FORMAT": _FORMATS[arguments[1].dtype], "C": _config(shape, launch)}
        coded_ring_kernel[_grid(launch.programs_per_multiprocessor, num_units, work)](
            *_in_words(arguments), **options, WARPS=launch.num_warps, **launch.options, **launch_options()
        )
        return
    launch = short_launch(
        group, shape["block_d"], dtype, row_units, is_quantized=is_quantized, is_coded=is_coded
    )
    config = _config(shape, launch)
    grid = _grid(launch.programs_per_multiprocessor, num_units, work)
    if is_coded:
        options = {**scales, "FORMAT": _FORMATS[arguments[1].dtype], "C": config}
        coded_tiles_kernel[grid](*_in_words(arguments), **options, **launch.options, **launch_options())
    else:
        options = {"is_beside_long": int(work.num_long > 0), **scales, "C": config}
        short_tiles_kernel[grid](*arguments, **options, **launch.options, **launch_options())


def _is_coded(shape: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the kernel for words of codes can take it: a quarter of a head's numbers must fill a product."""
    has_words = (
        shape.get("kv_kind") in ("int8", "fp8") and shape["head_dim"] % 4 == 0 and shape["block_d"] >= 64
    )
    return has_words and (dtype == torch.bfloat16 or INTERPRETED)


def _in_words(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Codes and their stride from block to block, counted in int32."""
    qkv, k_codes, v_codes, *rest = arguments
    tensors, (qkv_stride, out_stride, table_stride, block_stride), numbers = rest[:5], rest[5:9], rest[9:]
    codes = (k_codes.view(torch.int32), v_codes.view(torch.int32))
    return (qkv, *codes, *tensors, qkv_stride, out_stride, table_stride, block_stride // 4, *numbers)


def _run_long(
    arguments: tuple[Any, ...],
    scales: dict[str, Any],
    shape: dict[str, Any],
    work: PackedWork,
    dtype: torch.dtype,
) -> None:
    is_hopper = takes_hopper(arguments, shape)
    launch = HOPPER_LAUNCH if is_hopper else long_launch(shape["block_d"], dtype)
    config = _config(shape, launch)
    num_subtiles = triton.cdiv(TileRows.for_group(config.group).long * config.group, config.block_m)
    num_units = work.num_long * num_subtiles * config.num_kv_heads
    grid = _grid(launch.programs_per_multiprocessor, num_units, work)
    if is_hopper:
        launch_hopper(arguments, config, grid)
        return
    long_tiles_kernel[grid](
        *arguments,
        num_subtiles,
        **scales,
        C=config,
        **launch.options,
        **launch_options(),
    )


def _merge(
    work: PackedWork,
    partials: torch.Tensor,
    log_sums: torch.Tensor,
    out: torch.Tensor,
    num_heads: int,
    head_dim: int,
) -> None:
    merge_kernel[_grid(_MERGES_PER_MULTIPROCESSOR, work.num_reductions * num_heads, work)](
        partials,
        log_sums,
        out,
        work.buffer,
        out.stride(0),
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_P=_MERGED_AT_ONCE,
        num_warps=1,
        **launch_options(),
    )


def _config(shape: dict[str, Any], launch: LaunchShape) -> TileConfig:
    return TileConfig(**shape, block_m=launch.block_m, block_n=launch.block_n, num_stages=launch.num_stages)


def _grid(per_multiprocessor: int, num_units: int, work: PackedWork) -> tuple[int]:
    """A persistent grid, no larger than the work where that is known."""
    most = per_multiprocessor * num_multiprocessors(work.buffer.device)
    return (most if work.is_fixed else min(most, num_units),)
