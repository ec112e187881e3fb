"""What ``pack_weight`` brings: the reference linear over packed weights, over plain ones, and torch's own.

Every shape has as many matrices as fill ``--cold-mb``, multiplied in turn, so that weights come from memory as in a
forward pass. Times are CPU time of one thread, or wall time with more; the ways take turns and the fastest round
counts.

    python benchmarks/kernels/bench_linear.py --threads 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.kernels.reference.linear import linear, pack_weight

SMOLLM2 = {
    "qkv": (960, 576),
    "out": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49_152, 576),
}
Way = Callable[[torch.Tensor, torch.Tensor], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 64])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-mb", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    dtype = getattr(torch, args.dtype)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.dtype}; microseconds a matrix")
    print(f"{'weight':22s} {'rows':>5s} {'F.linear':>9s} {'plain':>9s} {'packed':>9s}")
    with torch.inference_mode():
        for name, (num_outputs, num_inputs) in SMOLLM2.items():
            count = max(1, args.cold_mb * 2**20 // (num_outputs * num_inputs * dtype.itemsize))
            plain = [torch.randn(num_outputs, num_inputs).to(dtype) for _ in range(count)]
            packed = [pack_weight(weight) for weight in plain]
            for num_rows in args.rows:
                x, out = (torch.randn(num_rows, n).to(dtype) for n in (num_inputs, num_outputs))
                times = compare(x, out, plain, packed, args.rounds, clock)
                shape = f"{name} {num_outputs}x{num_inputs}"
                print(f"{shape:22s} {num_rows:5d} " + " ".join(f"{t * 1e6:9.0f}" for t in times), flush=True)


def torch_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(F.linear(x, weight))


def compare(
    x: torch.Tensor,
    out: torch.Tensor,
    plain: list[torch.Tensor],
    packed: list[torch.Tensor],
    rounds: int,
    clock: Callable[[], float],
) -> list[float]:
    """Seconds a matrix: F.linear, the op on plain weights, the op on packed weights."""
    ways: list[tuple[Way, list[torch.Tensor]]] = [
        (lambda x, weight: torch_linear(x, weight, out), plain),
        (lambda x, weight: linear(x, weight, None, out), plain),
        (lambda x, weight: linear(x, weight, None, out), packed),
    ]
    best = [float("inf")] * len(ways)
    for _ in range(rounds + 1):
        for index, (way, weights) in enumerate(ways):
            start = clock()
            for weight in weights:
                way(x, weight)
            best[index] = min(best[index], (clock() - start) / len(weights))
    return best


if __name__ == "__main__":
    main()
