"""The equivalence matrix: in fp32, greedy tokens do not depend on how the engine schedules, caches or shares.

Every level of every factor runs alone against the defaults, and every pair of levels of two factors runs together at
least once (a greedy covering array). The reference is transformers on tiny random weights.
"""

from __future__ import annotations

import itertools
import math
import random
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace.config import EngineConfig
from headrace.core import prefix_wait, prompt_pace
from headrace.core.output import EngineCoreRequest
from headrace.core.scheduler import Scheduler
from headrace.engine.assemble import build_engine_core
from headrace.sampling_params import SamplingParams
from tests.e2e.tiny_models import MAKERS, VOCAB, Comparison, Reference, greedy_reference, make_model

FACTORS: dict[str, list[Any]] = {
    "enable_prefix_caching": [True, False],
    "max_prefill_chunk": [None, 1, 7, 64, 512],
    "block_size": [16, 1, 64],
    "max_steps_outstanding": [2, 1, 3, 4],
    "memory": ["roomy", "tight"],
    "policy": ["fcfs", "priority", "longest-prefix"],
    "n": [1, 3],
    "arrival": ["together", "reversed", "staggered"],
    "kernels": ["auto", "reference"],
    "cascade": ["auto", "on", "off"],
    "tiers": ["none", "host"],
    "salts": [1, 2],
    "wait": [None, 1, 1 << 30],
    "pace": [None, 24],
}
"""``salts``: how many tenants the prompts belong to. ``tiers``: with host memory, every prompt is asked for twice.
``wait``: tokens for which a request waits for another that computes them: as it is, always, never.
``pace``: an endless ``max_stall_ms`` and answers of unequal length, prompts filling up steps of so many tokens."""

NOT_SETTINGS = ("memory", "n", "arrival", "tiers", "salts", "wait", "pace")
NUM_OUTPUT = 20


def singles() -> list[dict[str, Any]]:
    """The defaults, then each other level alone."""
    base = {name: levels[0] for name, levels in FACTORS.items()}
    return [base, *({**base, name: level} for name, levels in FACTORS.items() for level in levels[1:])]


def pairs() -> list[dict[str, Any]]:
    """Few settings that hold every pair of levels of two factors."""
    rng = random.Random(0)
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(FACTORS, 2)
        for x, y in itertools.product(FACTORS[a], FACTORS[b])
    }
    chosen: list[dict[str, Any]] = []
    while wanted:
        candidates = [{name: rng.choice(levels) for name, levels in FACTORS.items()} for _ in range(60)]
        seed = next(iter(sorted(wanted, key=repr)))
        for candidate in candidates:
            candidate.update(dict(seed))
        best = max(candidates, key=lambda c: len(_pairs_of(c) & wanted))
        wanted -= _pairs_of(best)
        chosen.append(best)
    return chosen


def models_for(setting: dict[str, Any]) -> list[str]:
    """Models that can have it: tiers hold layers that keep every token."""
    return [name for name in MAKERS if setting["tiers"] == "none" or name in ("llama", "qwen3")]


def _pairs_of(setting: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(setting.items(), 2))


def prompts() -> list[list[int]]:
    """Lengths around blocks, windows and chunks; most share a prefix that ends inside a block."""
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB) for _ in range(75)]
    made = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 2, 15, 17, 33)]
    made += [[*shared[:length], rng.randrange(3, VOCAB)] for length in (5, 16, 31, 40, 63, 75, 75)]
    return [*made, shared[:64]]


@cache
def prepared(name: str, folder: Path) -> tuple[Path, list[Reference]]:
    model = make_model(name, folder)
    return folder, [greedy_reference(model, prompt, NUM_OUTPUT) for prompt in prompts()]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("tiny")
    return lambda name: prepared(name, root / name)


def run(folder: Path, setting: dict[str, Any]) -> tuple[dict[str, list[list[int]]], Any]:
    """All prompts through the engine core; {prompt name: answers of its children}, and the core."""
    least, rows = setting["wait"], setting["pace"]
    with ExitStack() as patches:
        if least is not None:
            patches.enter_context(
                mock.patch.object(prefix_wait, "least_saved_tokens", lambda cost_model: least)
            )
        if rows is not None:
            patches.enter_context(mock.patch.multiple(prompt_pace, EFFICIENT_ROWS=rows, _TILE_ROWS=1))
        return _run(folder, setting)


def output_len(setting: dict[str, Any], number: int) -> int:
    """Tokens that prompt ``number`` is answered with: with equal lengths there is no pace but the fastest."""
    return NUM_OUTPUT if setting["pace"] is None else NUM_OUTPUT - number


def _run(folder: Path, setting: dict[str, Any]) -> tuple[dict[str, list[list[int]]], Any]:
    block_size = setting["block_size"]
    roomy = 13 * setting["n"] * (-(-110 // block_size) + 2)
    longest = -(-(76 + NUM_OUTPUT + 4) // block_size) + 1
    groups = 6 if folder.name == "gemma3" else 1
    config = EngineConfig.from_options(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        num_kv_blocks=groups * (roomy if setting["memory"] == "roomy" else longest * 2 + 2),
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_stall_ms=None if setting["pace"] is None else math.inf,
        host_cache_bytes=16 << 20 if setting["tiers"] == "host" and setting["enable_prefix_caching"] else 0,
        **{k: v for k, v in setting.items() if k not in NOT_SETTINGS},
    )
    core = build_engine_core(config)
    requests = []
    rounds = "pq" if setting["tiers"] == "host" else "p"  # what was evicted is asked for again
    for name, (number, prompt) in itertools.product(rounds, enumerate(prompts())):
        length = output_len(setting, number)
        params = SamplingParams(n=setting["n"], temperature=0, max_tokens=length, ignore_eos=True)
        requests.append(
            EngineCoreRequest(
                f"{name}{number}",
                prompt,
                params,
                length,
                namespace=str(number % setting["salts"]),
                priority=(number * 7) % 3,
            )
        )
    if setting["arrival"] == "reversed":
        requests.reverse()
    answers = {request.request_id: [[] for _ in range(setting["n"])] for request in requests}
    gap = 3 if setting["arrival"] == "staggered" else 0
    while requests or core.has_work():
        while requests:
            core.add_request(requests.pop(0))
            if gap:
                break
        for _ in range(max(gap, 1)):
            for item in core.step():
                answers[item.request_id][item.child_index] += item.new_token_ids
            core.scheduler.check_integrity()
    core.shutdown()
    return answers, core


def compare(folder: Path, references: list[Reference], setting: dict[str, Any]) -> Any:
    answers, core = run(folder, setting)
    comparison = Comparison()
    for name, children in answers.items():
        reference = references[int(name[1:])]
        length = output_len(setting, int(name[1:]))
        expected = Reference(reference.token_ids[:length], reference.is_near_tie[:length])
        for child, token_ids in enumerate(children):
            comparison.add(f"{name}.{child} {setting}", expected, token_ids)
    comparison.check()
    return core


@pytest.mark.parametrize(
    ("name", "index"), [(name, i) for i, setting in enumerate(singles()) for name in models_for(setting)]
)
def test_one_switch_changes_no_token(model_folder: Any, name: str, index: int) -> None:
    folder, references = model_folder(name)
    compare(folder, references, singles()[index])


@pytest.mark.parametrize("index", range(len(pairs())))
def test_two_switches_change_no_token(model_folder: Any, index: int) -> None:
    names = models_for(pairs()[index])
    folder, references = model_folder(names[index % len(names)])
    compare(folder, references, pairs()[index])


def test_prompts_do_ride_along(model_folder: Any) -> None:
    folder, references = model_folder("llama")
    setting = {**singles()[0], "pace": 24, "enable_prefix_caching": False}
    rows: list[int] = []
    launch = Scheduler._launch
    with mock.patch.object(
        Scheduler, "_launch", lambda self, step: (rows.append(step.num_tokens), launch(self, step))[1]
    ):
        compare(folder, references, setting)
    assert max(rows) < 100 < sum(map(len, prompts()))


def test_cascade_does_happen(model_folder: Any) -> None:
    folder, references = model_folder("gemma3")
    core = compare(folder, references, {**singles()[0], "cascade": "on", "block_size": 4, "n": 3})
    assert core.scheduler.cascade.num_saved_tokens > 0


def test_the_tight_setting_does_preempt_and_the_cache_does_hit(model_folder: Any) -> None:
    folder, references = model_folder("llama")
    setting = {**singles()[0], "memory": "tight", "arrival": "staggered"}
    core = compare(folder, references, setting)
    assert core.stats().num_preemptions > 0
    assert core.stats().prefix_hit_tokens > 0


def test_tiers_do_give_back_blocks(model_folder: Any) -> None:
    folder, references = model_folder("llama")
    setting = {**singles()[0], "memory": "tight", "arrival": "staggered", "tiers": "host", "wait": 1 << 30}
    core = compare(folder, references, setting)
    assert core.stats().num_stored_blocks > 0
    assert core.stats().host_hit_tokens > 0


def test_tenants_share_nothing_and_waiting_shares_more(model_folder: Any) -> None:
    folder, references = model_folder("llama")
    hits = {}
    for salts in (1, len(references)):
        for wait in (1, 1 << 30):
            core = compare(folder, references, {**singles()[0], "salts": salts, "wait": wait})
            hits[salts == 1, wait == 1] = core.stats().prefix_hit_tokens
    assert hits[False, False] == hits[False, True] == 0 < hits[True, True]
    assert hits[True, False] < hits[True, True]
