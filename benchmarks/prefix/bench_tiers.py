"""Bringing a prompt back from host memory (or files) against computing it again: time to the first token.

    python benchmarks/prefix/bench_tiers.py llama-3-8b [--tokens 4096] [--disk FOLDER] [-o KEY=VALUE ...]
    python benchmarks/prefix/bench_tiers.py smollm2 --tokens 1024

The device's cache holds one prompt and a half, so each prompt drives the one before it out.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_runs import make_core, random_ids, run


def main() -> None:
    """Print times of the first token."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--host-gib", type=float, default=4.0)
    parser.add_argument("--disk", help="a folder; host memory then holds little")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--option", action="append", default=[], help="engine option as KEY=VALUE")
    args = parser.parse_args()
    core = make_core(
        args.model,
        args.option,
        max_model_len=args.tokens + 64,
        num_kv_blocks=(args.tokens + 64) * 3 // 32,
        host_cache_bytes=int(args.host_gib * (1 << 30)),
        disk_cache_path=args.disk,
    )
    rng = random.Random(0)
    prompts = [random_ids(rng, args.tokens) for _ in range(3)]
    run(core, [random_ids(rng, args.tokens)], 2)
    print("ready", flush=True)
    computed = [run(core, [prompt], 2).first_s[0] for prompt in prompts]
    print("computed: " + ", ".join(f"{1e3 * first:.1f}" for first in computed) + " ms", flush=True)
    restored = []
    for _ in range(args.rounds):
        for prompt in prompts:
            result = run(core, [prompt], 2)
            if result.num_computed < args.tokens // 4:
                restored.append(result.first_s[0])
                print(f"restored: {1e3 * restored[-1]:.1f} ms", flush=True)
    stats = core.stats()
    block_bytes = core.scheduler.kv.specs[0].bytes_per_block
    num_bytes = args.tokens // core.scheduler.kv.block_size * block_bytes
    print(
        f"{args.tokens} tokens are {num_bytes / 2**20:.0f} MiB; {len(restored)} of {3 * args.rounds} runs were restored"
    )
    print(f"computed: {1e3 * min(computed):.1f} ms (best of {len(computed)})")
    if restored:
        best = min(restored)
        print(f"restored: {1e3 * best:.1f} ms (best of {len(restored)}), {min(computed) / best:.1f}x faster,")
        print(f"  {num_bytes / best / 1e9:.1f} GB/s all told")
    print(
        f"tokens from host {stats.host_hit_tokens}, disk {stats.disk_hit_tokens}; failed {stats.num_failed_blocks}"
    )
    core.shutdown()


if __name__ == "__main__":
    main()
