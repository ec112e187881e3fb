"""Checks and times every Triton kernel against its limit on one GPU, and whole decoding steps made of them.

Kernels are compiled first, in processes that need no GPU. The limit is what the bytes (4.3 TB/s) or the products
(788 TFLOP/s) of a launch take on an H200; times are of launches within CUDA graphs, over memory that is not in the
L2. One table of the best variants is printed last; all figures go to --json.

    PYTHONPATH=. python benchmarks/kernels/bench_triton.py --json figures.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from triton_cases import all_cases
from triton_step import compile_steps, measure_steps
from triton_timing import Case, compiling_only, graph_us

from headrace.kernels.triton.launch import launch_options
from headrace.kernels.triton.norm import rms_norm

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="parts of case names; 'step' for whole steps")
    parser.add_argument(
        "--processes", type=int, default=14, help="that compile; 0 leaves it to the first launches"
    )
    parser.add_argument("--compile-only", help="i/n: compile every n-th case from the i-th on, without a GPU")
    parser.add_argument("--seconds", type=float, default=150.0, help="no new case is begun after this time")
    args = parser.parse_args()
    cases = [
        case for case in all_cases() if _is_wanted(args.only, f"{case.group} {case.name} {case.variant}")
    ]
    if args.compile_only:
        compile_part(cases, _is_wanted(args.only, "step"), *map(int, args.compile_only.split("/")))
        return
    start = time.perf_counter()
    if args.processes:
        compile_all(sys.argv[1:], args.processes)
    compiled_s = time.perf_counter() - start
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; compiled in {compiled_s:.0f} s")
    probe_dependent_launch()
    has_steps = _is_wanted(args.only, "step")
    steps = measure_steps(torch.device("cuda")) if has_steps else []
    records = measure_all(cases, start + args.seconds)
    total_s = time.perf_counter() - start
    if args.json:
        args.json.write_text(json.dumps({"steps": steps, "cases": records, "total_s": total_s}, indent=1))
    print_cases(records[::-1])  # the end of an output is what is kept of it
    print_matmuls(records)
    print_steps(steps)
    print(f"{total_s:.0f} s in all")


def probe_dependent_launch() -> None:
    """Whether CUDA graphs take programmatic dependent launch; if not, measure without."""
    x = torch.ones((4, 1024), device="cuda")
    try:
        graph_us([lambda: rms_norm(x, x[0], 1e-6, x)])
    except Exception as error:
        print(f"NO DEPENDENT LAUNCH in graphs: {error}")
        options = launch_options()
        options.clear()
        options["PDL"] = False


def _is_wanted(parts: Sequence[str], name: str) -> bool:
    return not parts or any(part in name for part in parts)


def compile_part(cases: Sequence[Case], has_steps: bool, index: int, count: int) -> None:
    """Fill Triton's cache on disk with the kernels of some cases."""
    device = torch.device("meta")
    with compiling_only():
        for case in cases[index::count]:
            for launch in case.make(device).launches[:1]:
                launch()
        for action in compile_steps(device)[index::count] if has_steps else []:
            action()


def compile_all(arguments: Sequence[str], processes: int) -> None:
    """Compile all cases in processes; whatever fails there fails again, and is reported, when it is measured."""
    command = [sys.executable, __file__, *arguments, "--compile-only"]
    children = [subprocess.Popen([*command, f"{index}/{processes}"]) for index in range(processes)]
    for child in children:
        child.wait()


def measure_all(cases: Sequence[Case], deadline: float) -> list[Record]:
    """The figures of the cases that are begun in time."""
    records: list[Record] = []
    for case in cases:
        if time.perf_counter() > deadline:
            print(f"out of time: {len(cases) - len(records)} cases left out")
            break
        records.append(measure(case))
    return records


def measure(case: Case) -> Record:
    """One case's figures, or its error."""
    record: Record = {
        "group": case.group,
        "name": case.name,
        "variant": case.variant,
        "limit_us": case.limit_us,
    }
    record |= {key: value for key, value in case.extra.items() if isinstance(value, int | str)}
    try:
        work = case.make(torch.device("cuda"))
        for launch in work.launches:
            launch()
        torch.cuda.synchronize()
        if work.check is not None:
            record["error"] = work.check()
            record["is_right"] = record["error"] <= case.max_error
        record["us"] = graph_us(work.launches)
        record["tb_per_s"] = case.bytes / record["us"] / 1e6
        record["tflop_per_s"] = case.flops / record["us"] / 1e6
    except Exception as error:
        record["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
        traceback.print_exc()
    return record


def print_cases(records: Sequence[Record]) -> None:
    """The best variant of each case, with what the others took."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        key = f"{record['group']} {record['name']}"
        if record["group"] == "sampling":
            key += f" {record['variant']}"
        by_name.setdefault(key, []).append(record)
    print(f"{'case':44}{'us':>8}{'limit':>8}{'share':>6}  best of variants, others in us")
    for name, group in by_name.items():
        for record in group:
            if "failure" in record or not record.get("is_right", True):
                print(f"FAILED {name} {record['variant']}: {record.get('failure') or record.get('error')}")
        good = sorted((r for r in group if r.get("us") and r.get("is_right", True)), key=lambda r: r["us"])
        if not good:
            continue
        best = good[0]
        others = "; ".join(f"{r['variant']} {r['us']:.1f}" for r in good[1:])
        share = 100 * best["limit_us"] / best["us"]
        print(
            f"{name:46}{best['us']:9.1f}{best['limit_us']:8.1f}{share:6.0f}%  {best['variant']}; {others}"[
                :240
            ]
        )


def print_matmuls(records: Sequence[Record]) -> None:
    """All matrix products of a decoding step: the best of ours, and cuBLAS."""
    sums: dict[tuple[str, int], dict[str, float]] = {}
    best: dict[tuple[str, int, str], tuple[float, int]] = {}
    for record in records:
        if record["group"] == "linear" and record.get("us"):
            way = "cublas" if record["variant"] == "cublas" else "own"
            key = (record["name"], record["rows"], way)
            us = min(record["us"], best.get(key, (float("inf"), 0))[0])
            best[key] = (us, record["count"])
    for (name, rows, way), (us, count) in best.items():
        total = sums.setdefault((name.split()[0], rows), {})
        total[way] = total.get(way, 0.0) + us * count / 1e3
    for (model, rows), total in sums.items():
        print(
            f"matmuls of a step, {model} T={rows}: " + ", ".join(f"{k} {v:.3f} ms" for k, v in total.items())
        )


def print_steps(steps: Sequence[Record]) -> None:
    """Whole steps."""
    for step in steps:
        kind = f"{'fused' if step['fused'] else 'plain'}{'' if step['pdl'] else ', no dependent launch'}"
        print(
            f"step {step['model']} batch {step['batch']}: {step['ms']:.3f} ms ({kind}), limit {step['limit_ms']:.3f}, "
            f"share {100 * step['limit_ms'] / step['ms']:.0f} %, eager launches {step['eager_host_ms']:.1f} ms of host"
            + ("" if step["finite"] else " NOT FINITE")
        )


if __name__ == "__main__":
    main()
