"""Functions of Gluon whose names differ between the versions of Triton that are supported."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""From global to shared memory, 4 to 16 bytes at a time, beside the program; ``async_load`` from 3.8 on."""

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Of the threads of a program, or of a group of warps; ``thread_barrier`` in 3.6."""

tensor_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""A tile of a tensor descriptor to shared memory, beside the program; ``async_load`` from 3.8 on."""
