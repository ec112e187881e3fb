"""Perplexity of a model by the form of its weights, the rounding of their inputs, and the type of its KV cache.

The text is a part of the Python 3.11 language reference (benchmarks/data/python_reference.txt, (c) Python Software
Foundation, PSF licence version 2), 28,103 tokens of SmolLM2. It is cut into windows; of each, tokens from ``--skip`` on
count. With ``--window 512 --skip 256`` that is what llama.cpp's perplexity tool counts, for models without a beginning
token. The first case is the one that the others are compared with.

    PYTHONPATH=. python benchmarks/cpu/bench_perplexity.py --model smollm2
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams

TEXT = Path(__file__).parents[1] / "data" / "python_reference.txt"
CASES = {
    "dense": {"quantization": "none"},
    "as stored, float inputs": {"linear_inputs": "float"},
    "as stored": {},
    "int8": {"quantization": "int8"},
    "int8-g32": {"quantization": "int8-g32"},
    "int4": {"quantization": "int4"},
    "int4-g32": {"quantization": "int4-g32"},
    "int4-g64-zp": {"quantization": "int4-g64-zp"},
    "int4-g128-zp": {"quantization": "int4-g128-zp"},
    "dense, KV int8": {"quantization": "none", "kv_cache_dtype": "int8"},
    "dense, KV fp8_e4m3": {"quantization": "none", "kv_cache_dtype": "fp8_e4m3"},
    "dense, KV fp8_e5m2": {"quantization": "none", "kv_cache_dtype": "fp8_e5m2"},
    "dense, KV int4": {"quantization": "none", "kv_cache_dtype": "int4"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--skip", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the text at most")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'case':28s} {'perplexity':>10s} {'change':>8s} {'seconds':>8s}", flush=True)
    for case in args.cases:
        start = time.perf_counter()
        figures[case] = perplexity(args, CASES[case])
        change = figures[case] / next(iter(figures.values())) - 1
        print(
            f"{case:28s} {figures[case]:10.4f} {change:+8.2%} {time.perf_counter() - start:8.1f}", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def perplexity(args: argparse.Namespace, options: dict[str, Any]) -> float:
    """exp of the mean negative log-probability of the tokens that count."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(
        model=args.model,
        max_model_len=args.window + 2,
        enable_prefix_caching=False,
        threads=args.threads,
        **options,
    ) as llm:
        ids = llm.get_tokenizer().encode(TEXT.read_text(), add_special_tokens=False)[: args.tokens]
        starts = range(0, len(ids) - args.window + 1, args.window)
        windows = [{"prompt_token_ids": ids[start : start + args.window]} for start in starts]
        outputs = llm.generate(windows, params, use_tqdm=False)
    total = count = 0.0
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        tokens = zip(window["prompt_token_ids"], output.prompt_logprobs, strict=True)
        for token_id, logprobs in list(tokens)[args.skip :]:
            assert logprobs is not None
            total -= logprobs[token_id].logprob
            count += 1
    return math.exp(total / count)


if __name__ == "__main__":
    main()
