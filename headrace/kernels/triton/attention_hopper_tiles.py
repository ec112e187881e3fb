"""When ``hopper_tiles_kernel`` takes the long items of a step, and how it is launched, as measured on an H200."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.triton.attention_common import TileConfig
from headrace.kernels.triton.attention_hopper import hopper_tiles_kernel
from headrace.kernels.triton.attention_hopper_copies import SPAN
from headrace.kernels.triton.attention_tiles import LaunchShape
from headrace.kernels.triton.launch import INTERPRETED, has_wgmma, launch_options

HOPPER_LAUNCH = LaunchShape(128, 128, 2, 4, 1)
"""Warps of one of its groups."""

_lock = threading.Lock()
_num_holders = 0
_this_thread = threading.local()

_HEAD_DIM = 128
_LEAST_BLOCK = 16
_REGISTERS = 168
"""Of a thread before the groups share them out: what 12 warps can have."""
_MAX_ROWS = 2**31 - 2**16
"""Of a cache, so that the place of every row, and of one beyond, is an int32."""
_LAYOUT = NVMMASharedLayout(128, 16, 2)
_TYPES = (torch.bfloat16, torch.float16)


def suits_hopper(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int = _LEAST_BLOCK) -> bool:
    """Whether the kernel runs on this device and takes such heads and blocks, over a cache of 16-bit numbers."""
    if INTERPRETED or not has_wgmma():
        return False
    has_heads = head_dim == _HEAD_DIM and num_heads // num_kv_heads <= HOPPER_LAUNCH.block_m
    return has_heads and block_size >= _LEAST_BLOCK and HOPPER_LAUNCH.block_n % block_size == 0


def takes_hopper(arguments: tuple[Any, ...], shape: dict[str, Any]) -> bool:
    """Whether the kernel can take the long items of a call (the arguments of ``long_tiles_kernel`` and those of a
    ``TileConfig``)."""
    if _num_holders and not getattr(_this_thread, "is_let_through", False):
        return False
    qkv, k_cache, v_cache, out = arguments[:4]
    is_plain = "kv_kind" not in shape and not shape["has_window"] and not shape["has_soft_cap"]
    return (
        suits_hopper(shape["num_heads"], shape["num_kv_heads"], shape["head_dim"], shape["block_size"])
        and is_plain
        and qkv.dtype in _TYPES
        and k_cache.dtype == v_cache.dtype == out.dtype == qkv.dtype
        and k_cache.stride(0) % shape["head_dim"] == 0
        and _num_rows(k_cache) <= _MAX_ROWS
        and all(tensor.data_ptr() % 16 == 0 for tensor in (qkv, k_cache, v_cache))
        and qkv.stride(0) % 16 == 0
    )


@contextmanager
def held_back() -> Iterator[None]:
    """Within it, of several engines in any, the plain kernel stands in: it compiles in less than half of the time, and
    first tokens wait for it."""
    _count_holders(1)
    try:
        yield
    finally:
        _count_holders(-1)


def _count_holders(change: int) -> None:
    global _num_holders
    with _lock:
        _num_holders += change


@contextmanager
def let_through() -> Iterator[None]:
    """Within it, in this thread, the kernel is taken though it is held back: to be compiled."""
    _this_thread.is_let_through = True
    try:
        yield
    finally:
        _this_thread.is_let_through = False


def launch_hopper(arguments: tuple[Any, ...], config: TileConfig, grid: tuple[int]) -> None:
    """arguments: as of ``long_tiles_kernel``."""
    qkv, k_cache, v_cache, *tensors = arguments[:8]
    qkv_stride, out_stride, table_stride, block_stride, scale = arguments[8:13]
    hopper_tiles_kernel[grid](
        qkv,
        _rows(k_cache),
        _rows(v_cache),
        *tensors,
        qkv_stride,
        out_stride,
        table_stride,
        block_stride // config.head_dim,
        scale,
        C=config,
        num_warps=HOPPER_LAUNCH.num_warps,
        maxnreg=_REGISTERS,
        **launch_options(),
    )


def _num_rows(cache: torch.Tensor) -> int:
    """From the first block's first to the last block's last, other layers' between them."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    return (num_blocks - 1) * (cache.stride(0) // head_dim) + num_kv_heads * block_size


def _rows(cache: torch.Tensor) -> TensorDescriptor:
    """A layer's keys or values [blocks, K, B, D] as rows [all, D], of which tiles of a block are copied."""
    head_dim = cache.shape[3]
    shape, tile = [_num_rows(cache), head_dim], [cache.shape[2], SPAN]
    return TensorDescriptor(cache, shape, [head_dim, 1], tile, _LAYOUT)
