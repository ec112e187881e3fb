"""Long prompt chunks: the way through a library (cuDNN) against the paged kernel, both as the engine runs them.

    python benchmarks/kernels/bench_library_attention.py [--json FILE]

For each chunk (tokens after cached ones) of a layer of Llama-3-8B: microseconds of the attention op over a plan of
``TritonBackend`` and of ``LibraryBackend``, gather, merge and the hand-over to the library's thread included; what the
host needs to queue the latter; the relative difference of their results, which must be small; the library's calls; and
what preparing them cost, which the engine does beside its steps. A chunk that the rule leaves to the paged kernel is
computed by the library all the same, so that the rule can be judged: "paged" at the end of its line says so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton_cases import LLAMA, error_of, paged_cache, randn
from triton_timing import event_ms

from headrace.attention.library import LibraryBackend, LibraryRule
from headrace.attention.triton import TritonBackend
from headrace.kernels.triton.attention import attention
from headrace.kernels.triton.library_attention import AttentionLibrary

CASES = [
    *((16384, 0), (8192, 0), (4096, 0), (3000, 0), (2300, 0), (2048, 0), (1024, 0)),
    *((8192, 8192), (8192, 21808), (5424, 24576), (2768, 60001), (2048, 14336), (2048, 2048), (1024, 30000)),
]
"""Tokens of the chunk, and cached ones before it."""
LARGEST_ERROR = 6e-3
RULE = LibraryRule()
EVERY = replace(RULE, min_rows=1, min_pairs=0, max_padding=float("inf"))


def measure(num_rows: int, num_cached: int, library: AttentionLibrary) -> dict[str, Any]:
    """One chunk's figures."""
    device, shape = torch.device("cuda"), LLAMA.shape
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    metadata, cache = paged_cache(shape, [num_rows], [num_rows + num_cached], 2, device)
    k_cache, v_cache = cache[:, 0, 0], cache[:, 0, 1]
    qkv = randn(device, num_rows, LLAMA.qkv)
    columns = [count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    position = torch.arange(num_cached, num_cached + num_rows, device=device)
    block = metadata.block_table[0, position // 16].long()
    for part, own in zip((k_cache, v_cache), qkv.split(columns, 1)[1:], strict=True):
        part[block, :, position % 16] = own.view(num_rows, -1, shape.head_dim)  # as rope_and_store leaves it
    backend = LibraryBackend(shape, library, EVERY)
    backend.plan(metadata)
    start = time.perf_counter()
    while library.thread.prepare():
        library.thread.wait()
    record: dict[str, Any] = {"rows": num_rows, "cached": num_cached}
    record["prepare_ms"] = 1e3 * (time.perf_counter() - start)
    outs = {}
    for name, plan in (
        ("paged", TritonBackend(shape, device).plan(metadata)),
        ("library", backend.plan(metadata)),
    ):
        assert ("library" in plan.derived) == (name == "library"), "the library failed; its warning says how"
        out = outs[name] = torch.empty((num_rows, LLAMA.attended), dtype=qkv.dtype, device=device)
        run = partial(attention, qkv, k_cache, v_cache, plan, out, *heads, shape.head_dim**-0.5)
        run()
        record[f"{name}_us"] = 1e3 * min(event_ms(run, 5) for _ in range(3))
        if name == "library":
            record["calls"] = [tuple(call) for call in plan.derived["library"].spans[0].lengths()]
            record["host_us"] = 1e6 * host_s(run)
    record["error"] = error_of(outs["library"], outs["paged"].double())
    record["is_chosen"] = RULE.span(0, 0, num_rows, num_cached) is not None
    record["flops"] = 4.0 * (num_rows * num_cached + num_rows * (num_rows + 1) / 2) * LLAMA.attended
    return record


def host_s(run: Callable[[], object]) -> float:
    """Seconds that the host needs to queue one call, while the device has others to do."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / 5


def show(record: dict[str, Any]) -> None:
    paged, library = record["paged_us"], record["library_us"]
    calls = " ".join(f"{rows}x{keys}{'c' if is_causal else ''}" for rows, keys, is_causal in record["calls"])
    rates = [record["flops"] / us / 1e6 for us in (paged, library)]
    print(
        f"{record['rows']} after {record['cached']}: paged {paged:.0f} us ({rates[0]:.0f} TFLOP/s), library "
        f"{library:.0f} us ({rates[1]:.0f}), x{paged / library:.2f}; host {record['host_us']:.0f} us; differs by "
        f"{record['error']:.1e}; {calls}; prepared in {record['prepare_ms']:.0f} ms; rule: "
        f"{'library' if record['is_chosen'] else 'paged'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = LLAMA.shape
    library = AttentionLibrary(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        16,
        torch.bfloat16,
        torch.device("cuda"),
        max_rows=RULE.max_rows(max(rows for rows, _ in CASES)),
        max_piece=RULE.max_piece,
    )
    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; cuDNN {torch.backends.cudnn.version()}"
    )
    records = []
    for case in CASES:
        records.append(measure(*case, library))
        show(records[-1])
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))
    wrong = [record for record in records if not record["error"] <= LARGEST_ERROR]
    assert not wrong, f"results differ by more than {LARGEST_ERROR}: {wrong}"
    print("all results agree")


if __name__ == "__main__":
    main()
