"""How many schemas compile, how many valid values their grammars accept, and that none accepts an invalid one.

python benchmarks/structured/bench_schemas.py --sample sample.jsonl --suite tests/draft2020-12 [--verbose]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.structured.schema_corpus import Case, accepts, bench_cases, byte_vocabulary, suite_cases
from headrace.errors import GrammarError
from headrace.grammar.base import load_backend
from headrace.grammar.constraint_text import prepare
from headrace.structured_outputs import StructuredOutputsParams


@dataclass
class Tally:
    """Counts of one family."""

    num_schemas: int = 0
    num_compiled: int = 0
    num_valid: int = 0
    num_valid_accepted: int = 0
    num_invalid: int = 0
    num_invalid_accepted: int = 0

    def row(self, name: str) -> str:
        """A row of a Markdown table."""
        return (
            f"| {name} | {self.num_compiled} of {self.num_schemas} | {self.num_valid_accepted} of {self.num_valid} "
            f"| {self.num_invalid_accepted} of {self.num_invalid} |"
        )


def run(cases: Iterable[Case], backend_name: str, verbose: bool) -> dict[str, Tally]:
    """Compile each schema and put its values to it; tallies by family, and "all"."""
    backend = load_backend(backend_name, byte_vocabulary())
    tallies: dict[str, Tally] = {}
    whole = Tally()
    for case in cases:
        for tally in (whole, tallies.setdefault(case.family, Tally())):
            tally.num_schemas += 1
        try:
            constraint, _ = prepare(
                StructuredOutputsParams(json=case.schema, backend=backend_name).to_constraint()
            )
            grammar = backend.compile(constraint)
        except GrammarError as error:
            if verbose:
                print(f"refused   {case.name}: {error.message[:200]}")
            continue
        for tally in (whole, tallies[case.family]):
            tally.num_compiled += 1
        for value, is_valid in case.values:
            is_accepted = accepts(grammar, value, case.schema)
            if verbose and is_accepted is not is_valid:
                print(f"{'unsound' if is_accepted else 'too strict'} {case.name}: {json.dumps(value)[:120]}")
            for tally in (whole, tallies[case.family]):
                tally.num_valid += is_valid
                tally.num_valid_accepted += is_valid and is_accepted
                tally.num_invalid += not is_valid
                tally.num_invalid_accepted += is_accepted and not is_valid
    return {**tallies, "all": whole}


def report(title: str, tallies: dict[str, Tally]) -> None:
    print(
        f"\n{title}\n\n| family | compiled | valid accepted | invalid accepted |\n| --- | --- | --- | --- |"
    )
    for name, tally in tallies.items():
        print(tally.row(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sample", type=Path, help="JSONL of public schemas with instances")
    parser.add_argument("--suite", type=Path, help="a draft's folder of the JSON-Schema-Test-Suite")
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--verbose", action="store_true")
    args: Any = parser.parse_args()
    started, num_unsound = time.monotonic(), 0
    for title, cases in (
        ("Public schemas", bench_cases(args.sample) if args.sample else ()),
        ("JSON-Schema-Test-Suite", suite_cases(args.suite) if args.suite else ()),
    ):
        tallies = run(cases, args.backend, args.verbose)
        if tallies["all"].num_schemas:
            report(title, tallies)
            num_unsound += tallies["all"].num_invalid_accepted
    print(f"\n{time.monotonic() - started:.0f} s; invalid values accepted: {num_unsound}")
    return 1 if num_unsound else 0


if __name__ == "__main__":
    sys.exit(main())
