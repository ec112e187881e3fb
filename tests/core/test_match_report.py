"""Why a match stopped: each reason, and that other namespaces are not told of."""

from __future__ import annotations

from array import array

import pytest

from headrace.core.cache_admin import CacheAdmin
from headrace.core.match_report import MatchReport, explain_match
from headrace.errors import RequestError
from tests.engine.core_harness import HYBRID, CoreHarness

DOCUMENT = [(7 * i) % 50 for i in range(40)]


def report(harness: CoreHarness, tokens: list[int], namespace: str = "") -> MatchReport:
    return explain_match(harness.kv, namespace, array("I", tokens).tobytes())


def serve(harness: CoreHarness, name: str, prompt: list[int], **options: object) -> None:
    harness.add(name, prompt, 2, **options)  # type: ignore[arg-type]
    harness.run()


def test_reasons() -> None:
    harness = CoreHarness(num_blocks=100)
    assert report(harness, DOCUMENT) == MatchReport(0, "nothing_cached")
    serve(harness, "r", DOCUMENT)
    assert report(harness, DOCUMENT) == MatchReport(39, "whole_prompt")
    other = [*DOCUMENT[:22], 49, *DOCUMENT[23:]]
    assert report(harness, other) == MatchReport(22, "different_token", 22, DOCUMENT[22], 49)
    first = [49, *DOCUMENT[1:]]
    assert report(harness, first) == MatchReport(0, "different_token", 0, DOCUMENT[0], 49)
    assert report(harness, [*DOCUMENT, *range(10)]).reason in ("different_token", "end_of_cache")
    assert report(harness, [*DOCUMENT[:21], 48]).reason == "different_token"
    assert report(harness, DOCUMENT[:22]) == MatchReport(20, "block_boundary"), (
        "one token is less than is copied"
    )
    off = CoreHarness(num_blocks=100, prefix_caching=False)
    assert report(off, DOCUMENT) == MatchReport(0, "disabled")


def test_a_salt_tells_nothing_of_others() -> None:
    harness = CoreHarness(num_blocks=100)
    serve(harness, "r", DOCUMENT, namespace="other tenant")
    assert report(harness, DOCUMENT) == MatchReport(0, "nothing_cached")
    assert report(harness, DOCUMENT, "mine") == MatchReport(0, "salt")
    assert report(harness, DOCUMENT, "other tenant").reason == "whole_prompt"


def test_what_had_to_leave_is_told_apart_from_what_never_was() -> None:
    harness = CoreHarness(num_blocks=16)
    serve(harness, "r", DOCUMENT)
    serve(harness, "s", [(11 * i + 3) % 50 for i in range(36)])
    found = report(harness, DOCUMENT)
    assert found.reason == "evicted" and found.num_cached_tokens < 39


def test_windows() -> None:
    harness = CoreHarness(specs=HYBRID, num_blocks=200)
    serve(harness, "r", DOCUMENT)
    for block in list(harness.kv.cache.evictor.idle):
        harness.kv.cache.evictor.drop(block)
    assert report(harness, DOCUMENT).reason == "window"


def test_a_pin_that_will_hold_is_told_from_one_that_cannot() -> None:
    admin = CacheAdmin(CoreHarness(num_blocks=100).kv)
    for length, pinnable in ((3, 0), (9, 8)):
        answer = admin.call("pin", {"token_ids": [*range(length)], "ttl_s": 60})
        assert answer == {"num_pinned_tokens": 0, "num_pinnable_tokens": pinnable, "num_tokens": length}


def test_the_tree_is_told_with_users_and_pins() -> None:
    harness = CoreHarness(num_blocks=100)
    serve(harness, "r", DOCUMENT)
    serve(harness, "s", [*DOCUMENT[:20], *range(20)])
    harness.add("running", [*DOCUMENT[:20], 1, 2, 3], 20)
    for _ in range(3):
        harness.step()
    admin = CacheAdmin(harness.kv)
    pinned = admin.call("pin", {"token_ids": DOCUMENT[:30], "ttl_s": 60})
    assert pinned == {"num_pinned_tokens": 28, "num_pinnable_tokens": 28, "num_tokens": 30}
    tree = admin.call("tree", {})
    top = tree["nodes"][0]
    assert (top["depth"], top["start"], top["num_tokens"], top["token_ids"][:3]) == (0, 0, 20, DOCUMENT[:3])
    assert top["users"] == 1 and top["is_pinned"], "a pin is no user"
    pinned = [node for node in tree["nodes"] if node["is_pinned"]]
    assert sum(node["num_tokens"] for node in pinned) == 28, "all of its path is marked"
    assert [node["users"] for node in pinned[1:]] == [0] * (len(pinned) - 1)
    assert sum(node["num_tokens"] for node in tree["nodes"]) == 4 * tree["num_cached_blocks"]
    assert {node["depth"] for node in tree["nodes"]} >= {0, 1}
    few = admin.call("tree", {"max_nodes": 2})
    assert len(few["nodes"]) == 2 and few["num_nodes_left_out"] == len(tree["nodes"]) - 2
    admin.call("pin", {"token_ids": DOCUMENT[:20], "ttl_s": 60})
    while harness.core.has_work():
        harness.step()
    tree = admin.call("tree", {})
    assert {node["users"] for node in tree["nodes"]} == {0} and tree["num_pins"] == 2
    assert sum(node["num_tokens"] for node in tree["nodes"] if node["is_pinned"]) == 28
    assert admin.call("unpin", {"token_ids": DOCUMENT[:30]}) == {"was_pinned": True}
    tree = admin.call("tree", {})
    assert sum(node["num_tokens"] for node in tree["nodes"] if node["is_pinned"]) == 20
    admin.call("unpin", {"token_ids": DOCUMENT[:20]})
    harness.run()
    for action, arguments in (
        ("burn", {}),
        ("pin", {"token_ids": [1], "ttl_s": -1}),
        ("explain", {"token_ids": [-1]}),
    ):
        with pytest.raises(RequestError):
            admin.call(action, arguments)
