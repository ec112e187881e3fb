"""Compiles the decode stack's kernel with a ring for Hopper, for sizes of models and for one of two ranks; run by
test_triton_compiles in a process without the interpreter, which cannot run Gluon."""

from __future__ import annotations

from typing import Any

import torch
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.kernels.triton import decode_stack, warmup
from headrace.kernels.triton.model_widths import LayerForms, ModelWidths, PackedForm
from headrace.kernels.triton.rank_exchange import RankExchange, Ranks

NUM_PROGRAMS = 132
Sizes = tuple[int, int, tuple[int, int, int], int, PackedForm | None]
SIZES: dict[str, Sizes] = {
    "llama-3-8b": (4096, 14336, (32, 8, 128), 1, None),
    "one of two ranks": (4096, 7168, (16, 4, 128), 2, None),
    "heads of 64": (2048, 8192, (32, 8, 64), 1, None),
    "groups of three, heads of 256": (1536, 4096, (6, 2, 256), 1, None),
    "4 bits by 32": (4096, 14336, (32, 8, 128), 1, PackedForm(4, 32, has_minimums=False)),
    "4 bits with minimums, one of two ranks, tiles of 1,024": (
        1024, 3072, (8, 4, 128), 2, PackedForm(4, 32, has_minimums=True),
    ),
    "4 bits by row": (2048, 8192, (32, 8, 64), 1, PackedForm(4, None, has_minimums=False)),
}  # fmt: skip


def compile_stack(
    hidden: int, inner: int, heads: tuple[int, int, int], num_ranks: int, packed: PackedForm | None
) -> None:
    """Of two layers, with query and key norms and, of weights that are not packed, a bias."""
    widths = ModelWidths(
        hidden, inner, *heads, vocab_size=1, block_size=16, dtype=torch.bfloat16, has_qk_norm=True,
        has_qkv_bias=packed is None, num_layers=2, layer_forms=(LayerForms.all_in(packed),),
    )  # fmt: skip
    table = torch.empty(num_ranks, dtype=torch.int64, device="meta")
    exchange = RankExchange(Ranks(num_ranks, num_ranks - 1), table, table, NUM_PROGRAMS)
    warmup.compile_stack(widths, exchange if num_ranks > 1 else None)


def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
    """As ``compile_ahead``, but nothing is loaded."""
    kernel.warmup(*args, grid=(1,), **options)


def main() -> None:
    decode_stack.compile_ahead = compile_only
    for name, sizes in SIZES.items():
        with compiling_only() as kernels:
            compile_stack(*sizes)
        assert [kernel for kernel, _ in kernels] == [
            "headrace.kernels.triton.ring_stack_kernel.ring_stack_kernel"
        ]
        print(f"compiled {name}")


if __name__ == "__main__":
    main()
