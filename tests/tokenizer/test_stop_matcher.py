from __future__ import annotations

import random
import time

from headrace.tokenizer.stop_matcher import StopMatcher


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """By definition: the match that ends first, and of those the longest. (start, end)."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def longest_open_end(text: str, stops: list[str]) -> int:
    return max(
        (
            size
            for size in range(len(text) + 1)
            for stop in stops
            if size < len(stop) and text.endswith(stop[:size])
        ),
        default=0,
    )


def test_equals_the_definition_however_the_text_is_cut() -> None:
    noise = random.Random(1)
    num_found = 0
    for _ in range(3000):
        letters = noise.choice(["ab", "abc", "aé🎉"])
        stops = [
            "".join(noise.choice(letters) for _ in range(noise.randrange(1, 6)))
            for _ in range(noise.randrange(1, 5))
        ]
        text = "".join(noise.choice(letters) for _ in range(noise.randrange(0, 25)))
        matcher, at, found = StopMatcher(stops), 0, None
        while at < len(text) and found is None:
            size = noise.randrange(1, 5)
            hit = matcher.feed(text[at : at + size])
            if hit is not None:
                found = at + hit[0] - hit[1], at + hit[0]
            else:
                assert matcher.depth == longest_open_end(text[: at + size], stops)
            at += size
        assert found == first_match(text, stops), (text, stops)
        num_found += found is not None
    assert num_found > 1000


def test_empty_stops_never_match() -> None:
    matcher = StopMatcher(["", ""])
    assert matcher.feed("anything") is None
    assert matcher.depth == 0


def test_many_and_long_stops_are_linear() -> None:
    stops = [f"{number:04}" * 20 for number in range(100)] + ["a" * 5000 + "b"]
    started = time.process_time()
    matcher = StopMatcher(stops)
    assert matcher.feed("a" * 100_000) is None
    assert matcher.depth == 5000
    assert time.process_time() - started < 1
