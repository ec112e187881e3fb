"""Headrace against transformers' generate on a CPU: the same weights, the same prompts, interleaved.

    OMP_NUM_THREADS=2 python benchmarks/cpu/bench_peers.py WORKLOAD.json [--repeat 3] [-o KEY=VALUE ...]

WORKLOAD.json holds lists "single" and "concurrent" of {"prompt_ids", "output_len"} for SmolLM2's vocabulary. The peer
gets the weights of the packaged file, dequantized, and runs ``concurrent`` as one left-padded batch; only requested
tokens count. Prints output tokens per second of each run and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
from headrace import LLM, SamplingParams
from tests.e2e.packaged_oracles import smollm2

Requests = list[tuple[list[int], int]]


@torch.inference_mode()
def run_peer(model: Any, requests: Requests) -> float:
    longest, output = max(len(ids) for ids, _ in requests), max(n for _, n in requests)
    ids = torch.zeros((len(requests), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(requests):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=output,
        min_new_tokens=output,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start


def run_headrace(llm: LLM, requests: Requests, salt: str) -> float:
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for ids, _ in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="the peer's; Headrace uses its default")
    parser.add_argument("--only", nargs="*", default=["single", "concurrent"])
    parser.add_argument(
        "-o", "--option", action="append", default=[], help="of Headrace, as kernels=reference"
    )
    args = parser.parse_args()
    options = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.option)}
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    content = json.loads(args.workload.read_text())
    peer = smollm2().to(getattr(torch, args.dtype))
    with LLM("smollm2", threads=torch.get_num_threads(), **options) as llm:
        for name in args.only:
            requests = [(row["prompt_ids"], row["output_len"]) for row in content[name]]
            total = sum(n for _, n in requests)
            run_headrace(llm, requests[:1], "warm")
            speeds: dict[str, list[float]] = {"headrace": [], "transformers": []}
            for index in range(args.repeat):
                speeds["headrace"].append(total / run_headrace(llm, requests, f"{name}{index}"))
                speeds["transformers"].append(total / run_peer(peer, requests))
                print(name, {who: round(values[-1], 1) for who, values in speeds.items()}, flush=True)
            ours, theirs = (statistics.median(values) for values in speeds.values())
            ratio = ours / theirs
            print(
                f"{name}: headrace {ours:.1f} tok/s, transformers {args.dtype} {theirs:.1f}, ratio {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
