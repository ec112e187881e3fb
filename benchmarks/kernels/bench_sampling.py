"""Sampling on the CPU: microseconds a row of argmax, filters and log-probabilities.

    python benchmarks/kernels/bench_sampling.py --threads 1

Logits are normal with a standard deviation of 3, whose top_p 0.9 holds about a twentieth of the vocabulary: much
flatter than a language model's, so top_p figures are near the worst.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from headrace.kernels.reference.sampling import (
    log_normalizer,
    row_argmax,
    sample_rows,
    token_ranks,
    top_tokens,
)


def best_us(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for vocab_size in (49152, 151936):
        for rows in (1, 8):
            logits = torch.randn(rows, vocab_size) * 3
            best, _ = row_argmax(logits)
            ones, key = torch.ones(rows), torch.randint(-(2**62), 2**62, (rows,))
            top_k, top_p, min_p = torch.full((rows,), 50), ones * 0.9, ones * 0.05
            common = (logits, best, ones, key)
            cases: dict[str, Callable[[], object]] = {
                "torch argmax": lambda x=logits: x.argmax(-1),
                "argmax": lambda x=logits: row_argmax(x),
                "sample": lambda c=common: sample_rows(*c),
                "sample min_p": lambda c=common, m=min_p: sample_rows(*c, min_p=m),
                "sample top_k 50": lambda c=common, k=top_k: sample_rows(*c, top_k=k, max_top_k=50),
                "sample top_p 0.9": lambda c=common, p=top_p: sample_rows(*c, top_p=p),
                "sample top_k top_p": lambda c=common, k=top_k, p=top_p: sample_rows(
                    *c, top_k=k, top_p=p, max_top_k=50
                ),
                "log normalizer": lambda x=logits: log_normalizer(x),
                "ranks": lambda x=logits, b=best: token_ranks(x, b),
                "top 20": lambda x=logits: top_tokens(x, 20),
            }
            for name, call in cases.items():
                print(
                    f"V {vocab_size:6d}  rows {rows:2d}  {name:20s} {best_us(call, options.repeats) / rows:9.1f} us/row"
                )


if __name__ == "__main__":
    main()
