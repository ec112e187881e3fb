"""Which kernels are compiled, with no GPU and without compiling: by warming up, and then by steps of all sizes.

Run by test_kernel_warmup as a program, since nothing here may run in Triton's interpreter. Launches on tensors of the
CPU, none of which is known to Triton, so none runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton.runtime.jit as jit
from triton_timing import compiling_only  # of benchmarks/kernels

from headrace.attention.base import AttentionShape, PlanLimits
from headrace.attention.triton import TritonBackend
from headrace.checkpoint import load_architecture, resolve_model
from headrace.kernels.arena import Arena
from headrace.kernels.quantized_cache import KV_FORMATS, KVFormats, is_coded
from headrace.kernels.registry import Ops, load_kernels
from headrace.kernels.triton.fusion import fuse
from headrace.kernels.triton.warmup import decode_calls, first_token_calls
from headrace.layers.context import LayerContext
from headrace.loader.base import open_weights
from headrace.models.registry import build_model
from headrace.parallel.state import ParallelState
from headrace.quant.precision import Precision
from headrace.runtime.cuda_graph import BUCKETS, GraphedSteps
from headrace.runtime.kernel_warmup import widths_of
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from headrace.runtime.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from tests.runtime.step_maker import Sequence, StepMaker


class Silent:
    """The collectives of a rank whose others do not answer; what is computed does not matter here."""

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        pass


CPU, BLOCK, MAX_SEQS, MAX_TOKENS, MAX_LEN = torch.device("cpu"), 16, 64, 512, 256


class Variants:
    """What would have been compiled."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.names: dict[str, str] = {}

    def note(self, kernel: jit.JITFunction, key: str) -> None:
        self.keys.add(key)
        self.names[key] = kernel.fn.__name__

    def count(self) -> Counter[str]:
        return Counter(self.names[key] for key in self.keys)


@contextmanager
def noting(variants: Variants):
    """Within it kernels are noted in place of being compiled, with the keys that Triton keeps them under."""
    original = jit.JITFunction._do_compile
    jit.JITFunction._do_compile = lambda kernel, key, *_: variants.note(kernel, key)
    try:
        yield
    finally:
        jit.JITFunction._do_compile = original


def make_runner(
    folder: Path,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | KVFormats,
    parallel: ParallelState,
    precision: Precision,
) -> tuple[ModelRunner, Any]:
    """A model of Triton's ops on the CPU, its runner with graphs that are not captured, its architecture."""
    source = resolve_model(str(folder))
    arch = load_architecture(source)
    context = LayerContext(
        ops=Ops.for_device("cuda", communicator=parallel.communicator),
        weights=open_weights(source, arch, "dummy", 0, None, CPU),
        dtype=dtype,
        device=CPU,
        arena=Arena(CPU),
        max_model_len=MAX_LEN,
        parallel=parallel,
        precision=precision,
    )
    model = build_model(arch, context)
    specs = kv_cache_specs_for(arch.layer_windows, model.num_kv_heads, arch.head_dim, BLOCK, kv_dtype)
    layout = KVCacheLayout.for_specs(specs, model.num_kv_heads, arch.head_dim, BLOCK, kv_dtype)
    kv_cache = KVCache(specs, layout, MAX_SEQS * MAX_LEN // BLOCK * len(specs), CPU, context.ops.copy_blocks)
    model.bind_kv_cache(kv_cache)
    model.reserve(2 * MAX_TOKENS, MAX_SEQS)
    shape = AttentionShape(model.num_heads, model.num_kv_heads, arch.head_dim, is_coded(dtype, kv_dtype))
    sampling = load_kernels("sampling", "cuda")
    runner = ModelRunner(
        model,
        kv_cache,
        [TritonBackend(shape, CPU) for _ in specs],
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        vocab_size=arch.vocab_size,
        max_logits_rows=8,
        sampling_kernels=sampling,
    )
    limits = PlanLimits(MAX_TOKENS, MAX_SEQS, MAX_LEN)
    is_windowed = any(arch.layer_windows)
    runner.small_steps = GraphedSteps(
        model,
        runner.states,
        specs,
        [TritonBackend(shape, CPU, limits) for _ in specs],
        max_tokens=MAX_TOKENS,
        max_requests=MAX_SEQS,
        sampling=sampling,
        optimize=lambda plan, num_tokens: fuse(plan, num_tokens, is_windowed=is_windowed),
        capture=lambda body: body,
    )
    return runner, arch


def walk(runner: ModelRunner, num_groups: int) -> None:
    """Prompts and decodes of every bucket, greedy and drawn, three times each: recorded, captured, replayed."""
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=64, seed=1)
        for bucket in [size for size in BUCKETS if size <= MAX_TOKENS]:
            for count in sorted({bucket, max(1, bucket - 3)}):
                num = min(count, 4)
                parts = [count // num + (index < count % num) for index in range(num)]
                steps(runner, num_groups, [part for part in parts if part <= MAX_LEN], params)
                if count <= MAX_SEQS:
                    steps(runner, num_groups, [1] * count, params)


def walk_requests(runner: ModelRunner, num_groups: int) -> None:
    """What only some requests ask for: filters in every combination, log-probabilities."""
    filters = {"top_k": (0, 5), "top_p": (1.0, 0.9), "min_p": (0.0, 0.1)}
    for values in itertools.product(*filters.values()):
        wanted = dict(zip(filters, values, strict=True))
        for num_logprobs in (None, 3):
            params = SamplingParams(temperature=0.8, max_tokens=64, seed=1, logprobs=num_logprobs, **wanted)
            with patch.object(torch, "empty", torch.zeros):  # no launch runs: tokens by chance are none
                steps(runner, num_groups, [3, 1, 2], params)


def steps(runner: ModelRunner, num_groups: int, prompts: list[int], params: SamplingParams) -> None:
    """Requests with these prompts: a step with all of them, and four in which they decode."""
    maker = StepMaker(MAX_SEQS * MAX_LEN // BLOCK * num_groups, BLOCK, num_groups)
    sequences = [Sequence(f"r{index}", [5] * length, params) for index, length in enumerate(prompts)]
    lengths = list(prompts)
    for _ in range(5):
        runner.execute_model(maker.step(list(zip(sequences, lengths, strict=True))))
        runner.sample_tokens()
        lengths = [1] * len(prompts)
    for sequence in sequences:
        maker.remove(sequence)
    runner.execute_model(maker.step([]))
    runner.sample_tokens()


def main() -> None:
    folder, size, dtype = Path(sys.argv[1]), int(sys.argv[2]), torch.bfloat16
    kv_dtype = KV_FORMATS.get(sys.argv[3], dtype)
    precision = Precision.parse(sys.argv[4], sys.argv[5])
    parallel = ParallelState(0, size, Silent()) if size > 1 else ParallelState()
    warm, stepped = Variants(), Variants()
    with compiling_only(), torch.inference_mode():
        runner, arch = make_runner(folder, dtype, kv_dtype, parallel, precision)
        widths = widths_of(
            arch,
            num_heads=arch.num_attention_heads // size,
            num_kv_heads=arch.num_kv_heads // size,
            tensor_parallel_size=size,
            block_size=BLOCK,
            dtype=dtype,
            is_whole=size == 1,
            kv_dtype=kv_dtype,
            num_slices=size,
            precision=precision,
        )
        with noting(warm):
            for make in (first_token_calls, decode_calls):
                for call in make(widths, CPU).values():
                    call()
        with noting(stepped):
            walk(runner, len(runner.kv_cache.specs))
            walk_requests(runner, len(runner.kv_cache.specs))
    late = stepped.keys - warm.keys
    report = {
        "warm": warm.count(),
        "steps": stepped.count(),
        "late": sorted((stepped.names[key], key) for key in late),
        "unused": sorted((warm.names[key], key) for key in warm.keys - stepped.keys),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
