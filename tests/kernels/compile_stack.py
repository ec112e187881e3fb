"""Compiles the decode stack's kernel with a ring for Hopper, for sizes of models and for one of two ranks; run by
test_triton_compiles in a process without the interpreter, which cannot run Gluon."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.kernels.triton import decode_stack
from headrace.kernels.triton.decode_stack import DecodeStack, LayerTensors
from headrace.kernels.triton.rank_exchange import RankExchange, Ranks

NUM_PROGRAMS = 132
SHAPES = {
    "llama-3-8b": (4096, 14336, (32, 8, 128), 1),
    "one of two ranks": (4096, 7168, (16, 4, 128), 2),
    "heads of 64": (2048, 8192, (32, 8, 64), 1),
    "groups of three, heads of 256": (1536, 4096, (6, 2, 256), 1),
}


def compile_stack(hidden: int, inner: int, heads: tuple[int, int, int], num_ranks: int) -> None:
    """Of two layers, with query and key norms and a bias."""
    num_heads, num_kv_heads, head_dim = heads
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    width = (num_heads + 2 * num_kv_heads) * head_dim
    norm, head_norm = torch.empty(hidden, device="meta"), torch.empty(head_dim, device="meta")
    blocks = empty((1, 2, 2, num_kv_heads, 16, head_dim))
    layer = LayerTensors(
        qkv=empty((width, hidden)),
        bias=empty(width),
        output=empty((hidden, num_heads * head_dim)),
        gate_up=empty((2 * inner, hidden)),
        down=empty((hidden, inner)),
        norm_1=norm,
        norm_2=norm,
        q_norm=head_norm,
        k_norm=head_norm,
        k_cache=blocks[:, 0, 0],
        v_cache=blocks[:, 0, 1],
        common=(),
        cos_sin=torch.empty((1, head_dim), device="meta"),
    )
    table = torch.empty(num_ranks, dtype=torch.int64, device="meta")
    exchange = RankExchange(Ranks(num_ranks, num_ranks - 1), table, table, NUM_PROGRAMS)
    DecodeStack([layer] * 2, 1e-6, 1.0, heads, "silu", exchange if num_ranks > 1 else None).compile()


def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
    """As ``compile_ahead``, but nothing is loaded."""
    kernel.warmup(*args, grid=(1,), **options)


def main() -> None:
    decode_stack.compile_ahead = compile_only
    for name, shape in SHAPES.items():
        with compiling_only() as kernels:
            compile_stack(*shape)
        assert [kernel for kernel, _ in kernels] == [
            "headrace.kernels.triton.ring_stack_kernel.ring_stack_kernel"
        ]
        print(f"compiled {name}")


if __name__ == "__main__":
    main()
