"""Time to fill one mask, for each token of documents that satisfy their constraints.

    python benchmarks/structured/bench_masks.py [--model smollm2 gemma3] [--sample sample.jsonl] [--repeat 3]

Prints p50, p99 and the longest in microseconds, compile times in milliseconds, and how many of the
documents' tokens were forced.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.structured.schema_corpus import bench_cases
from benchmarks.structured.shapes import DOCUMENTS, SCHEMAS, constraint
from headrace.config import ModelConfig
from headrace.engine.grammar_vocabulary import load_grammar_vocabulary
from headrace.errors import GrammarError
from headrace.grammar.base import GrammarBackend, TokenVocabulary, load_backend
from headrace.structured_outputs import Constraint


def documents(sample: Path | None) -> list[tuple[Constraint, list[str]]]:
    """Constraints with texts that satisfy them."""
    found = [(constraint(json=SCHEMAS[name]), [text]) for name, text in DOCUMENTS.items()]
    for case in bench_cases(sample) if sample is not None else ():
        texts = [json.dumps(value, ensure_ascii=False) for value, is_valid in case.values if is_valid]
        try:
            found.append((constraint(json=case.schema), texts))
        except GrammarError:
            continue
    return found


def measure(
    backend: GrammarBackend, vocabulary: TokenVocabulary, cases: list[Any], repeat: int
) -> dict[str, Any]:
    """Fill the mask before every token of every document."""
    mask = np.zeros((1, vocabulary.num_mask_words), np.uint32)
    times: list[int] = []
    compile_ms: list[float] = []
    num_forced = 0
    for wanted, texts in cases:
        started = time.perf_counter()
        try:
            grammar = backend.compile(wanted)
        except GrammarError:
            continue
        compile_ms.append(1e3 * (time.perf_counter() - started))
        for text in texts * repeat:
            matcher = grammar.matcher.copy()
            for token in vocabulary.encode(text):
                start = time.perf_counter_ns()
                matcher.fill_mask(mask, 0)
                times.append(time.perf_counter_ns() - start)
                num_forced += bool(matcher.forced_tokens())
                if not matcher.accept([token]):
                    break
    micros = np.sort(np.array(times)) / 1e3
    return {
        "grammars": len(compile_ms),
        "masks": len(micros),
        "mask_us_p50": round(float(np.percentile(micros, 50)), 1),
        "mask_us_p99": round(float(np.percentile(micros, 99)), 1),
        "mask_us_max": round(float(micros[-1]), 1),
        "compile_ms_p50": round(float(np.percentile(compile_ms, 50)), 2),
        "compile_ms_max": round(max(compile_ms), 1),
        "share_forced": round(num_forced / len(micros), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", nargs="+", default=["smollm2"])
    parser.add_argument("--sample", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--backend", default="llguidance")
    args = parser.parse_args()
    cases = documents(args.sample)
    for model in args.model:
        vocabulary = load_grammar_vocabulary(ModelConfig(model=model))
        started = time.perf_counter()
        backend = load_backend(args.backend, vocabulary)
        load_s = time.perf_counter() - started
        row = measure(backend, vocabulary, cases, args.repeat)
        print(
            json.dumps(
                {"model": model, "vocabulary": len(vocabulary.tokens), "load_s": round(load_s, 2), **row}
            )
        )


if __name__ == "__main__":
    main()
