"""All layers of one token in one launch: the kernel with a ring of weights against the plain one, by context, on a GPU.

Microseconds of all layers inside a CUDA graph, the copy of one row included; "error" is the relative difference between
the two kernels' results over random weights, both in bf16. Packed weights of 4 bits have the kernel with a ring alone.

    PYTHONPATH=. python benchmarks/kernels/bench_decode_stack.py [llama-3-8b qwen3-0.6b] [--forms plain ring int4-g32]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from triton_timing import graph_us

import headrace.kernels.triton.decode_stack as decode_stack
from headrace.kernels.triton.decode_stack import DecodeStack, LayerTensors, Matrix
from headrace.kernels.triton.word_matrix import WordMatrix
from headrace.quant.precision import Rounding, parse_form
from headrace.quant.rounding import round_weights

CONTEXTS = (1, 128, 1024, 4096)
BLOCK_SIZE = 16
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """num_layers, hidden size, inner size, (query heads, KV heads, head dim)."""

    num_layers: int
    hidden: int
    inner: int
    heads: tuple[int, int, int]
    has_qk_norm: bool


SHAPES = {
    "llama-3-8b": Shape(32, 4096, 14336, (32, 8, 128), has_qk_norm=False),
    "qwen3-0.6b": Shape(28, 1024, 3072, (16, 8, 128), has_qk_norm=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--forms", nargs="+", default=["plain", "ring", "int4-g32"])
    args = parser.parse_args()
    with_ring = decode_stack.ring_tiles
    for name in args.models:
        shape = SHAPES[name]
        expected: dict[int, torch.Tensor] = {}
        for kind in args.forms:
            layers = make_layers(shape, None if kind in ("plain", "ring") else kind)
            decode_stack.ring_tiles = with_ring if kind != "plain" else lambda layer, num_programs: None
            stack = DecodeStack(layers, EPS, shape.heads[2] ** -0.5, shape.heads, "silu")
            stack.compile()
            cells = []
            for context in CONTEXTS:
                us, found = measure(stack, shape, context)
                reference = expected.setdefault(context, found)
                error = (found - reference).norm() / reference.norm()
                cells.append(f"{context}: {us:.0f} us" + (f" (error {error:.0e})" if kind == "ring" else ""))
            print(f"{name} {kind}: " + ", ".join(cells), flush=True)


def make_layers(shape: Shape, form: str | None) -> list[LayerTensors]:
    """Random weights, in 4 bits where a form is named, and caches."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = shape.heads
    num_blocks = -(-max(CONTEXTS) // BLOCK_SIZE)
    sizes = (num_blocks, shape.num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    cache = torch.randn(sizes, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(max(CONTEXTS), head_dim, device="cuda")
    norm = torch.ones(shape.hidden, device="cuda")
    head_norm = torch.ones(head_dim, device="cuda") if shape.has_qk_norm else None

    def weight(rows: int, columns: int) -> Matrix:
        made = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
        if form is None:
            return made
        rounding = parse_form(form)
        assert isinstance(rounding, Rounding)
        return WordMatrix.pack(round_weights(made, rounding))

    return [
        LayerTensors(
            qkv=weight((num_heads + 2 * num_kv_heads) * head_dim, shape.hidden),
            bias=None,
            output=weight(shape.hidden, num_heads * head_dim),
            gate_up=weight(2 * shape.inner, shape.hidden),
            down=weight(shape.hidden, shape.inner),
            norm_1=norm,
            norm_2=norm.clone(),
            q_norm=head_norm,
            k_norm=head_norm,
            k_cache=cache[:, index, 0],
            v_cache=cache[:, index, 1],
            common=(),
            cos_sin=cos_sin,
        )
        for index in range(shape.num_layers)
    ]


def measure(stack: DecodeStack, shape: Shape, context: int) -> tuple[float, torch.Tensor]:
    """(microseconds, fp32 results) of a token at the end of a context."""
    num_blocks = -(-max(CONTEXTS) // BLOCK_SIZE)
    table = torch.arange(num_blocks, device="cuda", dtype=torch.int32)[None]
    plan, position = SimpleNamespace(block_table=table), torch.tensor([context - 1], device="cuda")
    embedding = torch.full((1, shape.hidden), 0.01, device="cuda", dtype=torch.bfloat16)
    residual, hidden = embedding.clone(), torch.zeros_like(embedding)

    def launch() -> None:
        residual.copy_(embedding)
        stack(residual, hidden, plan, position, position)

    us = graph_us([launch], seconds=0.5)
    return us, torch.cat([hidden, residual]).float()


if __name__ == "__main__":
    main()
