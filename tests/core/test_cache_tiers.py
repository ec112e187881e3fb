"""What leaves the device comes back from a tier: right contents, whatever is slow, full, lost or cancelled."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from headrace.core.cache_admin import CacheAdmin
from headrace.core.cache_tiers import TieredCache, _KeyChains
from headrace.core.interfaces import LoadItem
from headrace.core.load_times import TRUSTED_S, LoadTimes
from headrace.core.request import Request
from headrace.kv_transfer.transfer import BlockTransfer
from headrace.sampling_params import SamplingParams
from tests.engine.core_harness import VOCAB, CoreHarness

BLOCK = 4


class FakeHost:
    """Host slots over the fake device's contents; transfers end some looks later."""

    def __init__(self, num_slots: int, delay: int = 0, failures: float = 0.0) -> None:
        self.num_slots = num_slots
        self.slot_bytes = 8 * BLOCK
        self.delay = delay
        self.slots = np.zeros((num_slots, BLOCK), np.uint64)
        self.harness: CoreHarness | None = None
        self.under_way: list[list[Any]] = []
        self._rng = random.Random(0)
        self._failures = failures

    @property
    def device(self) -> np.ndarray:
        assert self.harness is not None
        return self.harness.executor._cache._content

    def view(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot].view(np.uint8))

    def store(self, block: int, slot: int) -> BlockTransfer:
        return self._begin(lambda: self._put(slot, self.device[block]))

    def load(self, items: list[LoadItem], files: FakeDisk | None) -> BlockTransfer:
        return self._begin(lambda: self._load(items, files))

    def tick(self) -> None:
        """Time passes for what is under way."""
        for entry in list(self.under_way):
            entry[0] -= 1
            if entry[0] <= 0:
                self.under_way.remove(entry)
                entry[1].finish(entry[2](), 1.0)

    def shutdown(self) -> None:
        self.under_way.clear()

    def _begin(self, action: Any) -> BlockTransfer:
        transfer = BlockTransfer()
        if self.delay:
            self.under_way.append([self.delay, transfer, action])
        else:
            transfer.finish(action(), 1.0)
        return transfer

    def _put(self, slot: int, content: np.ndarray) -> int:
        if self._rng.random() < self._failures:
            return 0
        self.slots[slot] = content
        return 1

    def _load(self, items: list[LoadItem], files: FakeDisk | None) -> int:
        for count, item in enumerate(items):
            if self._rng.random() < self._failures:
                return count
            if item.is_on_disk and (files is None or not files.read(item.key, self.view(item.slot))):
                return count
            self.device[item.block] = self.slots[item.slot]
        return len(items)


class FakeDisk:
    """Files in a dict; some are lost."""

    def __init__(self, losses: float = 0.0) -> None:
        self.files: dict[bytes, bytes] = {}
        self.doubted: set[bytes] = set()
        self._rng = random.Random(1)
        self._losses = losses

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, key: object) -> bool:
        return key in self.files

    def read(self, key: bytes, out: memoryview) -> bool:
        if self._rng.random() < self._losses:
            self.files.pop(key, None)
        data = self.files.get(key)
        if data is not None:
            out[:] = data
        return data is not None

    def write(self, key: bytes, payload: memoryview) -> BlockTransfer:
        self.files[key] = bytes(payload)
        transfer = BlockTransfer()
        transfer.finish(1, 1.0)
        return transfer

    def doubt(self, keys: Iterable[bytes]) -> None:
        self.doubted.update(keys)

    def tend(self) -> None:
        pass

    def clear(self) -> None:
        self.files.clear()

    def num_bytes(self) -> int:
        return sum(map(len, self.files.values()))

    def files_left(self) -> tuple[int, str] | None:
        return 0, ""

    def shutdown(self) -> None:
        pass


def make(
    num_slots: int, disk: FakeDisk | None = None, delay: int = 0, failures: float = 0.0, **options: Any
) -> tuple[CoreHarness, TieredCache, FakeHost]:
    host = FakeHost(num_slots, delay, failures)
    tiers = TieredCache(host, disk, BLOCK, lambda start, count: 0.0)
    harness = CoreHarness(**{"num_blocks": 24, "max_num_batched_tokens": 64, **options}, tier=tiers)
    host.harness = harness
    tiers.attach(harness.kv)
    return harness, tiers, host


def rest(harness: CoreHarness, host: FakeHost) -> None:
    """Until nothing is left, transfers included."""
    for _ in range(100_000):
        if not harness.core.has_work():
            break
        harness.step()
        host.tick()
    while host.under_way:
        host.tick()
    harness.core.scheduler.schedule()
    harness.run()


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("failures", [0.0, 0.3])
def test_random_traffic_over_more_documents_than_the_device_holds(
    delay: int, has_disk: bool, failures: float
) -> None:
    disk = FakeDisk(losses=failures) if has_disk else None
    harness, tiers, host = make(12 if has_disk else 60, disk, delay, failures, lag=1, max_steps_outstanding=2)
    rng = random.Random(delay)
    documents = [[rng.randrange(VOCAB) for _ in range(37)] for _ in range(5)]
    for number in range(60):
        prompt = [*documents[rng.randrange(5)][: rng.choice([37, 37, 30, 12])], rng.randrange(VOCAB)]
        harness.add(f"r{number}", prompt, rng.randint(2, 8), n=rng.choice([1, 1, 2]))
        for _ in range(rng.randint(1, 6)):
            harness.step()
            host.tick()
        if rng.random() < 0.15:
            harness.core.abort_requests([f"r{rng.randrange(number + 1)}"])
    rest(harness, host)
    harness.check_answers()
    stats = tiers.stats()
    assert stats.num_stored_blocks > 20 and stats.host_hit_tokens > 0
    assert (stats.disk_hit_tokens > 0) is has_disk
    assert (stats.num_failed_blocks > 0) is (failures > 0)
    assert sorted(tiers._free_slots + list(tiers._slots.values())) == list(range(host.num_slots))
    assert not tiers._busy


def test_a_restored_prompt_is_not_computed() -> None:
    harness, tiers, _ = make(60)
    document = [(3 * i) % VOCAB for i in range(60)]
    other = [(7 * i + 1) % VOCAB for i in range(80)]
    harness.add("first", document, 2)
    harness.run()
    harness.add("other", other, 2)
    harness.run()
    before = harness.core.stats().num_computed_tokens
    harness.add("again", document, 2)
    harness.run()
    harness.check_answers()
    assert harness.core.stats().num_computed_tokens - before <= BLOCK + 2
    assert harness.answers[("again", 0)].num_cached_tokens >= 56
    causes = [cause for _, _, cause in harness.answers[("again", 0)].timeline.events]
    assert "loads from a cache tier" in causes
    assert tiers.stats().host_hit_tokens > 0


@pytest.mark.parametrize(("factor", "namespace"), [(11, ""), (3, "tenant")])
def test_an_id_that_is_used_again_names_another_prompt(factor: int, namespace: str) -> None:
    """The core lets ids of finished requests be used again: blocks are those of the prompt, never of the name."""
    harness, tiers, _ = make(60)
    documents = {step: [(step * i + 1) % VOCAB for i in range(60)] for step in (3, 7, 9, 11, 13)}
    for name, step in (("first", 3), ("other", 7), ("same", 3), ("third", 9), ("fourth", 13)):
        harness.add(name, documents[step], 2)
        harness.run()
    assert tiers.stats().host_hit_tokens > 0
    harness.add("same", documents[factor], 2, namespace=namespace)
    harness.run()
    harness.check_answers()
    assert harness.answers[("same", 0)].num_cached_tokens == 0


def test_a_report_tells_what_the_tiers_hold() -> None:
    """``num_tier_tokens`` is what a request then loads at least, and nothing of another tenant's."""
    harness, tiers, _ = make(60, FakeDisk())
    document = [(3 * i) % VOCAB for i in range(60)]
    admin = CacheAdmin(harness.kv, tiers)

    def told(namespace: str = "") -> int:
        return int(
            admin.call("explain", {"token_ids": document, "namespace": namespace}).get("num_tier_tokens", 0)
        )

    assert told() == 0
    harness.add("first", document, 2)
    harness.run()
    assert told() == 0, "the device has it"
    harness.add("other", [(7 * i + 1) % VOCAB for i in range(80)], 2)
    harness.run()
    lacking, foreign = told(), told("tenant")
    cached = admin.call("explain", {"token_ids": document})["num_cached_tokens"]
    assert cached + lacking == 56 and lacking > 0 and foreign == 0
    harness.add("again", document, 2)
    harness.run()
    assert lacking <= tiers.stats().host_hit_tokens <= 56, (
        "room for it may push out more of what the device had"
    )


def test_those_who_want_the_same_prefix_wait_for_its_load() -> None:
    harness, tiers, host = make(60, delay=3, num_blocks=60)
    document = [(3 * i) % VOCAB for i in range(100)]
    harness.add("first", document, 2)
    harness.run()
    harness.add("other", [(7 * i + 1) % VOCAB for i in range(230)], 2)
    rest(harness, host)
    before = tiers.stats().host_hit_tokens
    for number in range(3):
        harness.add(f"again{number}", [*document, number], 2)
    rest(harness, host)
    harness.check_answers()
    assert 0 < tiers.stats().host_hit_tokens - before <= 100, "loaded once"


def test_a_cancelled_load_leaves_its_blocks_alone_until_it_ends() -> None:
    harness, _, host = make(60)
    document = [(3 * i) % VOCAB for i in range(60)]
    harness.add("first", document, 2)
    harness.run()
    harness.add("other", [(7 * i + 1) % VOCAB for i in range(80)], 2)
    harness.run()
    host.delay = 5
    harness.add("again", document, 2)
    for _ in range(20):  # first its room is made by stores
        harness.step()
        if harness.kv.cache.evictor.loading:
            break
        host.tick()
    assert harness.kv.cache.evictor.loading
    harness.core.abort_requests(["again"])
    harness.step()
    harness.core.scheduler.check_integrity()
    assert harness.kv.cache.evictor.loading, "the copies go on"
    rest(harness, host)
    assert not harness.kv.cache.evictor.loading and not harness.core.scheduler.tier_loads._bases


def test_a_reset_forgets_all_tiers_and_what_is_under_way() -> None:
    disk = FakeDisk()
    harness, tiers, host = make(60, disk)
    document = [(3 * i) % VOCAB for i in range(60)]
    harness.add("first", document, 2)
    harness.run()
    harness.add("other", [(7 * i + 1) % VOCAB for i in range(80)], 2)
    harness.run()
    assert tiers.stats().num_host_blocks and len(disk)
    host.delay = 3
    harness.add("third", [(11 * i + 1) % VOCAB for i in range(80)], 2)
    for _ in range(3):
        harness.step()
    tiers.reset()
    rest(harness, host)
    harness.add("again", document, 2)
    rest(harness, host)
    assert tiers.stats().host_hit_tokens == tiers.stats().disk_hit_tokens == 0
    assert sorted(tiers._free_slots + list(tiers._slots.values())) == list(range(host.num_slots))


def make_timed(
    num_host: int, num_disk: int, ms_per_token: float = 0.5
) -> tuple[TieredCache, Request, LoadTimes, list[float]]:
    """Tiers that hold a request's blocks, the first in host memory, over a clock that is set by hand."""
    now, disk = [0.0], FakeDisk()
    times = LoadTimes(lambda: now[0])
    tiers = TieredCache(FakeHost(8), disk, BLOCK, lambda start, count: ms_per_token * count, times)
    request = Request("r", list(range(BLOCK * (num_host + num_disk))), SamplingParams(), max_tokens=4)
    for index, key in enumerate(tiers._keys.of_request(request)):
        if index < num_host:
            tiers._keep(key, index)
        else:
            disk.files[key] = b""
    return tiers, request, times, now


def test_a_load_that_was_slower_than_computing_is_not_made() -> None:
    tiers, request, times, _ = make_timed(5, 0)
    assert tiers.match(request, 0) == (20, True)
    times.learn(["host"], 1.9)
    assert tiers.match(request, 0) == (20, True)
    times.learn(["host"], 4.0)
    assert tiers.match(request, 0) == (0, True)
    unknown, request, times, _ = make_timed(5, 0, ms_per_token=0.0)
    times.learn(["host"], 4.0)
    assert unknown.match(request, 0) == (20, True)


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    """By one short load at a time, and none for a while after one that was slow, too."""
    tiers, request, times, now = make_timed(0, 6)
    times.learn(["disk"] * 4, 4 * 200.0)
    for _ in range(3):
        now[0] += TRUSTED_S - 1
        assert tiers.match(request, 0) == (0, True)
        now[0] += 1
        assert tiers.match(request, 0) == (8, True) and tiers.match(request, 6) == (6, True)
        tiers._loads.append(None)  # type: ignore[arg-type]
        assert tiers.match(request, 0) == (0, True), "one tries"
        tiers._loads.clear()
        times.learn(["disk"] * 2, 2 * 200.0)
    now[0] += TRUSTED_S
    times.learn(["disk"] * 2, 2 * 1.0)
    assert tiers.match(request, 0) == (24, True)


def test_a_slow_disk_is_measured_behind_what_host_memory_holds() -> None:
    tiers, request, times, now = make_timed(3, 3)
    times.learn(["host", "host", "disk"], 200.0)
    assert tiers.match(request, 0) == (12, True), "host memory goes on, whose blocks are loaded alone"
    now[0] += TRUSTED_S
    times.learn(["host"], 0.1)
    assert tiers.match(request, 0) == (16, True)
    times.learn(["host", "host", "host", "disk"], 1.3)
    assert tiers.match(request, 0) == (24, True)
    times.learn(["host", "disk"], 400.0)
    assert tiers.match(request, 0) == (12, True)


def test_what_lies_behind_a_damaged_file_is_doubted() -> None:
    disk = FakeDisk()
    document = [(3 * i) % VOCAB for i in range(60)]
    first, _, _ = make(60, disk)
    first.add("first", document, 2)
    first.run()
    for step in (7, 11):
        first.add(f"other{step}", [(step * i + 1) % VOCAB for i in range(80)], 2)
        first.run()
    harness, tiers, _ = make(60, disk)
    keys = tiers._keys.of_request(Request("r", document, SamplingParams(), max_tokens=1))
    assert sum(key in disk.files for key in keys) > 8 and keys[2] in disk.files
    read = disk.read
    disk.read = lambda key, out: key != keys[2] and read(key, out)  # type: ignore[method-assign]
    harness.add("again", document, 2)
    harness.run()
    harness.check_answers()
    assert tiers.stats().disk_hit_tokens == 2 * BLOCK and disk.doubted >= set(keys[2:])
    assert not disk.doubted & set(keys[:2])


def test_tenants_have_keys_of_their_own() -> None:
    chains = _KeyChains(BLOCK)
    tokens = list(range(20))
    data = array("I", tokens).tobytes()
    mine = [chains.of_prefix("", data[: 16 * count]) for count in (5, 4, 3, 2, 1)][::-1]
    request = Request("r", tokens, SamplingParams(), max_tokens=4)
    assert chains.of_request(request) == mine
    salted = Request("s", tokens, SamplingParams(), max_tokens=4, namespace="tenant")
    assert not set(chains.of_request(salted)) & set(mine)
    assert chains.of_prefix("tenant", data) == chains.of_request(salted)[-1]


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (None, {"is_done": False}),
        ((0, ""), {"is_done": True, "num_files_left": 0}),
        ((2, "read-only"), {"is_done": True, "num_files_left": 2, "files_left_reason": "read-only"}),
    ],
)
def test_files_that_a_reset_could_not_remove_are_told(
    left: tuple[int, str] | None, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FakeDisk()
    harness, tiers, _ = make(8, disk)
    monkeypatch.setattr(disk, "files_left", lambda: left)
    assert CacheAdmin(harness.kv, tiers).call("files_left", {}) == told
    assert CacheAdmin(harness.kv).call("files_left", {})["num_files_left"] == 0
