"""Host time of the model runner per step: everything but the model's own ops.

    python benchmarks/runtime/bench_model_runner.py

A model that computes nothing takes the place of the real one: one hidden row per token, logits that are already there.
Requests decode one token a step with a context of 500 tokens. The medians are in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata, AttentionPlan, ForwardBatch
from headrace.attention.reference import ReferenceBackend
from headrace.core.output import NewRequest, SchedulerOutput
from headrace.kernels.reference.sampling import row_argmax
from headrace.layers.sliced_logits import SlicedLogits
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from headrace.runtime.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams

CONTEXT, BLOCK = 500, 16
CASES = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


class NullModel:
    """Logits are ready; the forward returns the ids."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self.logits = torch.randn(rows, vocab_size) * 3

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.input_ids

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        return SlicedLogits(self.logits[: len(rows)])


class TimedBackend(ReferenceBackend):
    """Adds up the time spent in planning."""

    def __init__(self) -> None:
        super().__init__(AttentionShape(1, 1, 8), torch.device("cpu"))
        self.total_s = 0.0

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        start = time.perf_counter()
        plan = super().plan(metadata)
        self.total_s += time.perf_counter() - start
        return plan


def make_runner(rows: int, vocab_size: int, backends: list[TimedBackend]) -> tuple[ModelRunner, NullModel]:
    windows = (None,) if len(backends) == 1 else (None, 256)
    specs = kv_cache_specs_for(windows, 1, 8, BLOCK, torch.float32)
    layout = KVCacheLayout.for_specs(specs, 1, 8, BLOCK, torch.float32)
    model = NullModel(rows, vocab_size)
    limits = {"max_num_seqs": rows, "max_model_len": 4096, "vocab_size": vocab_size, "max_logits_rows": 64}
    return ModelRunner(model, KVCache(specs, layout, 4), backends, **limits), model


def measure(
    rows: int, vocab_size: int, num_groups: int, params: dict[str, Any], steps: int
) -> dict[str, float]:
    """Median microseconds of each part of a step."""
    backends = [TimedBackend() for _ in range(num_groups)]
    runner, model = make_runner(rows, vocab_size, backends)
    names = [f"r{i}" for i in range(rows)]
    table = list(range((CONTEXT + steps) // BLOCK + 1))
    requests = [
        NewRequest(
            name, list(range(CONTEXT)), CONTEXT - 8, [table] * num_groups, SamplingParams(**params), row
        )
        for row, name in enumerate(names)
    ]
    times: dict[str, list[float]] = {"execute": [], "plan": [], "sample": [], "argmax": []}
    for step in range(steps):
        output = SchedulerOutput(
            step + 1,
            names,
            [CONTEXT - 1 + step] * rows,
            [1] * rows,
            list(range(rows)),
            [] if step else requests,
        )
        for backend in backends:
            backend.total_s = 0.0
        start = time.perf_counter()
        runner.execute_model(output)
        middle = time.perf_counter()
        runner.sample_tokens().finish()
        end = time.perf_counter()
        row_argmax(model.logits)
        times["argmax"].append(time.perf_counter() - end)
        times["plan"].append(sum(backend.total_s for backend in backends))
        times["execute"].append(middle - start)
        times["sample"].append(end - middle)
    return {name: 1e6 * statistics.median(values[2:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"vocabulary {options.vocab_size}, {options.threads} thread(s), medians in us of {options.steps} steps"
    )
    print("rows groups parameters             execute (of it plan)   sample (one argmax: )  greedy overhead")
    for rows in (1, 32, 256):
        for num_groups, names in ((1, list(CASES)), (2, ["greedy"])):
            for name in names:
                found = measure(rows, options.vocab_size, num_groups, CASES[name], options.steps)
                overhead = found["execute"] + found["sample"] - found["argmax"]
                print(
                    f"{rows:4d} {num_groups:6d} {name:20s} {found['execute']:10.0f} ({found['plan']:6.0f})"
                    f"   {found['sample']:10.0f} ({found['argmax']:6.0f})"
                    + (f"   {overhead:10.0f}" if name == "greedy" else "")
                )


if __name__ == "__main__":
    main()
