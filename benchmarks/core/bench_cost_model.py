"""Does the cost model predict steps it was not fitted to?

    OMP_NUM_THREADS=2 python benchmarks/core/bench_cost_model.py [--model smollm2]

Runs the engine over two mixes of prompts and streams to fit the model, then over other mixes (other batch sizes,
prompt lengths, chunk sizes) and prints the relative error of the step time that was predicted before each step. The
fit stays that of the first mixes; only the pace, which the last steps of a size tell, goes on. In brackets without it.
"""

from __future__ import annotations

import argparse
import random

import msgspec

from headrace.config import EngineConfig
from headrace.core.cost_model import CostModel, StepFeatures
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.sampling_params import SamplingParams

Observation = tuple[StepFeatures, float]


class Recorder(CostModel):
    """A cost model that also remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Observation] = []

    def observe(self, features: StepFeatures, elapsed_ms: float) -> None:
        self.seen.append((msgspec.structs.replace(features), elapsed_ms))
        super().observe(features, elapsed_ms)


def run_mix(
    core: EngineCore, rng: random.Random, count: int, prompts: tuple[int, int], outputs: int, wave: int
) -> None:
    """Requests of random lengths, some of them arriving later, until all are done."""
    names = iter(range(count))
    pending = count
    while pending or core.has_work():
        for _ in range(min(pending, rng.randint(1, wave))):
            number, output = next(names), rng.randint(2, outputs)
            ids = [rng.randrange(1000, 40000) for _ in range(rng.randint(*prompts))]
            params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
            core.add_request(EngineCoreRequest(f"{prompts}{number}", ids, params, output))
            pending -= 1
        for _ in range(rng.randint(1, 12)):
            core.step()


class Frozen(CostModel):
    """What it was fitted to stays; the pace follows, if it is to."""

    def __init__(self, seen: list[Observation], has_pace: bool) -> None:
        super().__init__()
        self._is_frozen = False
        for features, ms in seen:
            self.observe(features, ms)
        self._is_frozen, self._has_pace = True, has_pace
        self._pace = [0.0] * len(self._pace)

    def errors(self, steps: list[Observation]) -> list[float]:
        """Relative errors of predictions, each made before the step was seen."""
        errors = []
        for features, ms in steps:
            errors.append(abs(self.predict_ms(features) / ms - 1))
            if self._has_pace:
                self.observe(features, ms)
        return sorted(errors)

    def _fit(self) -> None:
        if not self._is_frozen:
            super()._fit()


def at(errors: list[float], share: float) -> float:
    """Percentile in percent."""
    return 100 * errors[min(len(errors) - 1, int(share * len(errors)))]


def summary(errors: list[float], plain: list[float]) -> str:
    parts = [
        f"P{100 * share:.0f} {at(errors, share):.1f} [{at(plain, share):.1f}] %" for share in (0.5, 0.9, 0.99)
    ]
    return f"{len(errors)} steps, relative error {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    config = EngineConfig.from_options(model=args.model, max_steps_outstanding=1, enable_prefix_caching=False)
    core = build_engine_core(config)
    recorder = Recorder()
    core.scheduler.cost_model = recorder
    core.scheduler.batching._cost_model = recorder  # type: ignore[union-attr]
    rng = random.Random(0)
    run_mix(core, rng, 60, (4, 700), 24, 3)
    run_mix(core, rng, 60, (40, 120), 60, 16)
    fitted, plain = (Frozen(recorder.seen, has_pace) for has_pace in (True, False))
    pooled: tuple[list[float], list[float]] = ([], [])
    for label, count, prompts, outputs, wave in (
        ("many streams", 48, (4, 40), 40, 24),
        ("long prompts", 8, (900, 1500), 12, 2),
        ("few streams", 6, (100, 300), 40, 2),
    ):
        recorder.seen.clear()
        run_mix(core, rng, count, prompts, outputs, wave)
        found = fitted.errors(recorder.seen), plain.errors(recorder.seen)
        print(f"{label:13s}", summary(*found))
        for all_errors, errors in zip(pooled, found, strict=True):
            all_errors += errors
    print(f"{'all of them':13s}", summary(*(sorted(errors) for errors in pooled)))
    core.shutdown()


if __name__ == "__main__":
    main()
