"""The beam search's rules: against exhaustive search where the beams hold everything, and rule by rule."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from headrace.core.beam_scores import BeamScores, Hypothesis
from headrace.core.output import TokenLogprobs

VOCAB = 5
STOP = 0


def logprobs_after(path: tuple[int, ...], seed: int) -> list[float]:
    """A made-up model: log-probabilities of every token after a sequence."""
    rng = random.Random(f"{path} {seed}")
    weights = [rng.random() ** 3 + 1e-3 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def entry_after(path: tuple[int, ...], seed: int, count: int = VOCAB) -> TokenLogprobs:
    """As the device gives it: the sampled token first, then the best ones."""
    logprobs = logprobs_after(path, seed)
    order = sorted(range(VOCAB), key=lambda token: -logprobs[token])[:count]
    return TokenLogprobs([order[0], *order], [logprobs[order[0]], *(logprobs[t] for t in order)], 1)


def tokens_of(hypothesis: Hypothesis | None) -> tuple[int, ...]:
    return () if hypothesis is None else tuple(link.token for link in hypothesis.path())


def search(seed: int, width: int, **options: object) -> BeamScores:
    fields = {
        "length_penalty": 1.0,
        "early_stopping": "never",
        "max_tokens": 4,
        "stop_token_ids": frozenset({STOP}),
    }
    scores = BeamScores(width, **{**fields, **options})  # type: ignore[arg-type]
    while not scores.is_done:
        scores.advance([entry_after(tokens_of(beam), seed, scores.num_candidates) for beam in scores.beams])
    return scores


def exhaustive(seed: int, length_penalty: float, max_tokens: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every answer with its score, best first."""
    found = []
    for length in range(1, max_tokens + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            ends = path[-1] == STOP or length == max_tokens
            if not ends or STOP in path[:-1]:
                continue
            total = sum(logprobs_after(path[:i], seed)[token] for i, token in enumerate(path))
            found.append((total / length**length_penalty, path))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("seed", range(4))
def test_wide_enough_a_beam_is_exhaustive(seed: int, length_penalty: float) -> None:
    scores = search(seed, VOCAB**4, length_penalty=length_penalty)
    best = exhaustive(seed, length_penalty, 4)[:20]
    found = [(score, tokens_of(hypothesis)) for score, hypothesis in scores.finished[:20]]
    assert [path for _, path in found] == [path for _, path in best]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in best])


def test_one_beam_is_greedy_where_nothing_stops() -> None:
    for seed in range(5):
        scores = search(seed, 1, stop_token_ids=frozenset())
        path: tuple[int, ...] = ()
        for _ in range(4):
            logprobs = logprobs_after(path, seed)
            path += (logprobs.index(max(logprobs)),)
        assert tokens_of(scores.finished[0][1]) == path


def test_candidates_suffice_for_whole_distributions() -> None:
    for seed, width in itertools.product(range(10), (2, 3)):
        few = search(seed, width, max_tokens=7)
        whole = BeamScores(
            width, length_penalty=1.0, early_stopping="never", max_tokens=7, stop_token_ids=frozenset({STOP})
        )
        while not whole.is_done:
            whole.advance([entry_after(tokens_of(beam), seed) for beam in whole.beams])
        assert [tokens_of(h) for _, h in few.finished] == [tokens_of(h) for _, h in whole.finished]


def test_early_stopping_ends_with_the_last_answer_it_needs() -> None:
    lengths = []
    for early_stopping in (True, False, "never"):
        scores = search(3, 3, early_stopping=early_stopping, max_tokens=40, length_penalty=1.0)
        assert len(scores.finished) == 3
        lengths.append(scores._num_tokens)
    assert lengths == sorted(lengths) and lengths[0] < lengths[2]


def test_no_answer_ends_before_min_tokens() -> None:
    scores = search(1, 4, min_tokens=3, max_tokens=6)
    assert all(len(tokens_of(hypothesis)) >= 4 for _, hypothesis in scores.finished)
    assert any(tokens_of(hypothesis)[-1] == STOP for _, hypothesis in scores.finished)
