"""All-reduce: right against float64, and how long, by size: NCCL and one shot, in a CUDA graph. Then the sum with the
residual and the norm after it: three ways.

python benchmarks/parallel/bench_collectives.py [--size 2] [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from spmd import WaitClock, run_on_ranks

from headrace.config import ParallelConfig
from headrace.parallel.fused_reduce import FusedReduce
from headrace.parallel.one_shot import MAX_BYTES, OneShotCommunicator
from headrace.parallel.state import Communicator
from headrace.parallel.torch_communicator import TorchCommunicator
from headrace.parallel.world import World
from headrace.platforms.cuda import graph_ms

HIDDEN = 4096


def work(world: World, device: torch.device, _clock: WaitClock) -> None:
    """One rank."""
    size, group = world.size, dist.new_group()
    paths: dict[str, Communicator] = {"library": TorchCommunicator(group, size, device.type)}
    if device.type == "cuda":
        paths["one shot"] = OneShotCommunicator(paths["library"], group, device)
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048):
        parts = [
            torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
            for rank in range(size)
        ]
        exact = torch.stack(parts).double().sum(0)
        num_bytes = num_rows * HIDDEN * 2
        for name, path in paths.items():
            if name == "one shot" and num_bytes > MAX_BYTES:
                continue
            x = parts[world.rank].to(device)
            path.all_reduce(x)
            worst = float(((x.cpu().double() - exact).abs() / (exact.abs() + 1)).max())
            everywhere = x.new_empty((num_rows, HIDDEN * size))
            paths["library"].all_gather(x, everywhere)
            is_same = bool((everywhere.view(num_rows, size, HIDDEN) == x[:, None]).all())
            ms = time_ms(partial(path.all_reduce, torch.zeros_like(x)), device)
            if world.rank == 0:
                print(
                    f"{name:9s} {num_rows:5d} rows {num_bytes:9d} bytes {1e3 * ms:8.1f} us  worst error {worst:.1e} "
                    f"same bits on all ranks: {is_same}",
                    flush=True,
                )
            assert is_same and worst < 0.01
    if device.type == "cuda":
        compare_fused(world, device, paths)


def compare_fused(world: World, device: torch.device, paths: dict[str, Communicator]) -> None:
    """Sum, residual and norm in one kernel against two."""
    from headrace.kernels.triton.norm import add_rms_norm

    one_shot = paths["one shot"]
    assert isinstance(one_shot, OneShotCommunicator)
    fused = FusedReduce(one_shot, HIDDEN, torch.bfloat16, world.rank)
    is_right = one_shot.all_agree(fused.is_right(paths["library"]))
    if world.rank == 0:
        print(f"fused sum and norm is right: {is_right}", flush=True)
    assert is_right
    weight = torch.ones(HIDDEN, device=device)
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 448, 512, 1024):
        x, residual = torch.zeros(2, num_rows, HIDDEN, dtype=torch.bfloat16, device=device)

        def apart(path: Communicator, x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            path.all_reduce(x)
            add_rms_norm(x, residual, weight, 1e-5, x)

        times = [graph_ms(partial(apart, path)) for path in paths.values()]
        times.append(graph_ms(partial(fused.op, x, residual, weight, 1e-5, x)))
        if world.rank == 0:
            texts = [f"{name} {1e3 * ms:.1f} us" for name, ms in zip([*paths, "fused"], times, strict=True)]
            print(f"sum and norm of {num_rows:4d} rows: {', '.join(texts)}", flush=True)


def time_ms(call: partial[None], device: torch.device) -> float:
    """Without the host on a GPU."""
    if device.type == "cuda":
        return graph_ms(call)
    start = time.perf_counter()
    for _ in range(5):
        call()
    return (time.perf_counter() - start) / 5 * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    parallel = ParallelConfig(tensor_parallel_size=args.size, all_reduce="library")
    run_on_ranks(work, parallel, args.device)


if __name__ == "__main__":
    main()
