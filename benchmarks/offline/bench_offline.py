"""Offline throughput on the fixed workloads, everything submitted at once, random weights.

    python benchmarks/offline/bench_offline.py llama-3-8b single b64 mix [--repeat 2] [--json FILE] [-o KEY=VALUE ...]

MODEL is a folder, or the name of a shape in benchmarks/data/models. Prints, per workload, output and input tokens per
second (best of the repeats), steps, the mean step, and the share of wall time that the device computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WORKLOADS, Workload

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest, ModelRunnerOutput
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"


def run(core: EngineCore, workload: Workload, temperature: float) -> dict[str, Any]:
    """One pass over the workload from an empty prefix cache."""
    core.reset_prefix_cache()
    device_ms: list[float] = []
    update = core.scheduler.update_from_output

    def recording(output: ModelRunnerOutput) -> Any:
        device_ms.append(output.elapsed_ms)
        return update(output)

    core.scheduler.update_from_output = recording  # type: ignore[method-assign]
    start = time.perf_counter()
    for number, (ids, output) in enumerate(workload):
        params = SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True, seed=number)
        core.add_request(EngineCoreRequest(f"r{number}", ids, params, output))
    num_output = 0
    while core.has_work():
        for item in core.step():
            num_output += len(item.new_token_ids)
    wall = time.perf_counter() - start
    core.scheduler.update_from_output = update  # type: ignore[method-assign]
    assert num_output == sum(output for _, output in workload)
    device_ms.sort()
    return {
        "step_ms_p50": device_ms[len(device_ms) // 2],
        "step_ms_p99": device_ms[int(0.99 * (len(device_ms) - 1))],
        "longest_steps_ms": device_ms[-12:],
        "wall_s": wall,
        "output_tok_s": num_output / wall,
        "input_tok_s": sum(len(ids) for ids, _ in workload) / wall,
        "steps": len(device_ms),
        "step_ms": sum(device_ms) / max(len(device_ms), 1),
        "device_share": sum(device_ms) / 1e3 / wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    options = dict(text.split("=", 1) for text in args.option)
    folder = SHAPES / args.model
    start = time.perf_counter()
    config = EngineConfig.from_options(
        **{
            "model": str(folder) if folder.is_dir() else args.model,
            "load_format": "dummy" if folder.is_dir() else "auto",
            "max_model_len": 32768 if folder.is_dir() else None,
            "skip_tokenizer_init": True,
            **{key: yaml.safe_load(value) for key, value in options.items()},
        }
    )
    core = build_engine_core(config, is_offline=True)
    print(
        f"{args.model}: ready in {time.perf_counter() - start:.1f} s, {core.stats().num_kv_blocks} KV blocks",
        flush=True,
    )
    rows = []
    for name in args.workloads:
        temperature = 0.6 if name in ("mix", "nano") else 0.0
        workload = WORKLOADS[name]()
        results = [run(core, workload, temperature) for _ in range(args.repeat)]
        best = max(results, key=lambda result: float(result["output_tok_s"]))
        rows.append({"model": args.model, "workload": name, **best})
        print(
            f"{name:10s} {best['output_tok_s']:9.1f} tok/s out {best['input_tok_s']:10.1f} in, "
            f"wall {best['wall_s']:.2f} s, {best['steps']} steps of "
            f"{best['step_ms']:.2f} ms on the device (P50 {best['step_ms_p50']:.2f}, P99 {best['step_ms_p99']:.2f}), "
            f"busy {100 * best['device_share']:.1f} %",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    core.shutdown()


if __name__ == "__main__":
    main()
