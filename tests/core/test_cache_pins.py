"""Pinned prefixes stay as long as they are meant to, and never stop the engine."""

from __future__ import annotations

import random
from array import array

from headrace.core.cache_pins import CachePins
from tests.engine.core_harness import CoreHarness

DOCUMENT = [(7 * i) % 50 for i in range(40)]
OTHER = [(11 * i + 3) % 50 for i in range(40)]


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(num_blocks: int) -> tuple[CoreHarness, Time]:
    harness, time = CoreHarness(num_blocks=num_blocks), Time()
    harness.kv.pins = CachePins(harness.kv.cache, time)
    return harness, time


def cached(harness: CoreHarness, tokens: list[int]) -> int:
    return harness.kv.cache.tree.num_matching("", array("I", tokens).tobytes())


def pin(harness: CoreHarness, tokens: list[int], ttl_s: float) -> int:
    return harness.kv.pins.pin("", array("I", tokens).tobytes(), ttl_s).num_bytes // 4


def serve(harness: CoreHarness, name: str, prompt: list[int]) -> None:
    harness.add(name, prompt, 2)
    while harness.core.has_work():
        harness.step()


def test_a_pinned_prefix_outlives_what_is_used_later() -> None:
    harness, time = make(24)
    serve(harness, "a", DOCUMENT)
    assert pin(harness, DOCUMENT, 10.0) == 40
    for number in range(4):
        serve(harness, f"b{number}", [number, *OTHER])
    assert cached(harness, DOCUMENT) == 40
    time.now = 11.0
    for number in range(4):
        serve(harness, f"c{number}", [number, *OTHER])
    assert cached(harness, DOCUMENT) < 40 and len(harness.kv.pins) == 0
    harness.run()


def test_a_pin_takes_hold_as_its_prefix_is_computed() -> None:
    harness, _ = make(40)
    assert pin(harness, DOCUMENT, 10.0) == 0
    assert not harness.kv.cache.tree.roots
    serve(harness, "a", DOCUMENT)
    serve(harness, "b", OTHER[:20])
    assert [node.num_locks for node in harness.kv.pins.nodes()] == [1]
    assert harness.kv.pins.unpin("", array("I", DOCUMENT).tobytes())
    assert not harness.kv.pins.unpin("", array("I", DOCUMENT).tobytes())
    harness.run()


def test_nothing_is_kept_of_less_than_a_block() -> None:
    harness, _ = make(24)
    assert pin(harness, DOCUMENT[:3], 10.0) == 0
    assert len(harness.kv.pins) == 0
    assert not harness.kv.pins.unpin("", array("I", DOCUMENT[:3]).tobytes())


def test_pins_give_way_before_the_engine_stands_still() -> None:
    harness, _ = make(24)
    serve(harness, "a", DOCUMENT)
    serve(harness, "b", OTHER)
    pin(harness, DOCUMENT, 10.0)
    pin(harness, OTHER, 5.0)
    serve(harness, "c", [(3 * i + 1) % 50 for i in range(60)])
    assert harness.answers[("c", 0)].finish_reason == "length"
    assert len(harness.kv.pins) <= 1
    harness.kv.reset_prefix_cache()
    assert len(harness.kv.pins) == 0 and not harness.kv.cache.tree.roots
    harness.run()


def test_random_pins_and_traffic() -> None:
    rng, (harness, time) = random.Random(0), make(40)
    documents = [[rng.randrange(50) for _ in range(rng.randrange(5, 60))] for _ in range(8)]
    for number in range(120):
        document = rng.choice(documents)
        action = rng.random()
        if action < 0.3:
            pin(harness, document[: rng.randrange(1, 60)], rng.randrange(1, 30))
        elif action < 0.4:
            harness.kv.pins.unpin("", array("I", document).tobytes())
        elif action < 0.42:
            harness.kv.reset_prefix_cache()
        else:
            harness.add(f"r{number}", [*document, number % 50], rng.randrange(1, 9))
        harness.step()
        time.now += 1.0
    while harness.core.has_work():
        harness.step()
    harness.check_answers()
    harness.kv.pins.release_all()
    harness.run()
