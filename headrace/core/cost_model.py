"""Predicts a step's time from what is in it, fitted online to the steps that were measured.

The model is linear with non-negative coefficients in a few terms that grow with the step: a constant (weights read,
launches), tokens (with hinges, because a matrix product over few rows costs as much as its weights' bytes, and with
jumps, because kernels change and tiles are full at certain numbers of rows), requests, sampled rows, KV tokens read,
and query-key pairs. Fitting is weighted least squares on the relative error with slow forgetting; the normal equations
are kept, and take in a fit's new observations at once, so an observation costs microseconds and history nothing.

Beside that a device has its moods: neighbours, heat, weights that a cache keeps between small steps but not after a
large one. They last for tens of steps, longer than a step and shorter than the fit's memory; so the last errors of
steps of a like size correct the next prediction (the pace). A new fit has other errors, so each makes the pace anew
from the last steps: what it has learned would be corrected once more by the errors of the fit before it.
"""

from __future__ import annotations

import math
from collections import deque
from operator import mul

import msgspec
import numpy as np

CERTAIN_SAVED_TOKENS = 1 << 18
"""A step that reads so many KV tokens less is faster, whatever the fit says: while the same requests decode, its terms
rise together, and what the reads cost is then mistaken for what the requests do."""

_HINGES = (8, 64)
_JUMPS = (1, 2, 3, 4, 8, 16, 32, 64)
"""Tokens beyond which kernels do something else: one row, a few, then tiles of 8, 16 and 32 and 64 rows."""
_NUM_TERMS = 7 + len(_HINGES) + len(_JUMPS)
_PACE_LIMITS = (4, 16, 64)
"""Tokens up to which steps have a pace of their own: what one size's steps tell says little of another's."""
_PACE_GAIN = 0.5
_PACE_MOST = 0.7
"""Of the logarithm of an error: one step that took twice as long, as others do not, moves the pace by two fifths."""
_PACE_STEPS = 4
"""Of each size, which tell the pace after a fit."""
_FORGET = 0.998
_MIN_OBSERVATIONS = 8
_REFIT_EVERY = 8
_SWEEPS = 30
_SETTLED = 1e-4
"""A sweep that changes what is predicted for the steps seen by less, relatively and root mean square, is the last."""


class StepFeatures(msgspec.Struct):
    """What one step computes.

    num_tokens: tokens through the linears.  num_requests: requests in the batch.  num_sampled: rows of logits.
    kv_tokens_read: sum over requests of the KV length after the step; what several share (cascade) counts once.
    num_shared_rows: query tokens gathered for shared spans, one for each span, whose results are merged.
    attention_pairs: sum over requests of (tokens in the step) * (mean KV length they attend to).
    """

    num_tokens: int = 0
    num_requests: int = 0
    num_sampled: int = 0
    kv_tokens_read: int = 0
    attention_pairs: float = 0.0
    num_shared_rows: int = 0

    def add(self, start: int, num_tokens: int, samples: bool) -> None:
        """Count a request that computes tokens [start, start + num_tokens)."""
        self.num_tokens += num_tokens
        self.num_requests += 1
        self.num_sampled += samples
        self.kv_tokens_read += start + num_tokens
        self.attention_pairs += num_tokens * (start + 0.5 * num_tokens)

    def share(self, num_kv_tokens: int, num_requests: int, num_rows: int) -> None:
        """Count a span of ``num_kv_tokens`` that ``num_requests`` counted requests read together."""
        self.kv_tokens_read -= num_kv_tokens * (num_requests - 1)
        self.num_shared_rows += num_rows


_SMALLEST_STEP = StepFeatures(
    num_tokens=1, num_requests=1, num_sampled=1, kv_tokens_read=1, attention_pairs=0.5
)


class CostModel:
    """Milliseconds of a step as a function of its ``StepFeatures``."""

    def __init__(self) -> None:
        self.num_observations = 0
        self._num_long_observations = 0
        self.prompt_token_ms = 0.0
        """Of a token, in the last step of a prompt; 0 before the first. All that is known until there are enough."""
        self._new: list[tuple[list[float], float]] = []
        self._gram = np.zeros((_NUM_TERMS, _NUM_TERMS))
        self._moment = np.zeros(_NUM_TERMS)
        self._coefficients = [0.0] * _NUM_TERMS
        self._pace = [0.0] * (len(_PACE_LIMITS) + 1)  # logarithms
        self._recent: list[deque[tuple[StepFeatures, float]]] = [
            deque(maxlen=_PACE_STEPS) for _ in self._pace
        ]

    @property
    def is_fitted(self) -> bool:
        """True once enough steps were seen for ``predict_ms`` to mean something."""
        return self.num_observations >= _MIN_OBSERVATIONS

    @property
    def knows_prompts(self) -> bool:
        """True once enough steps of more than ``_HINGES`` tokens were seen: decodes and short rests of prompts do not
        tell what a prompt's tokens cost."""
        return self._num_long_observations >= _MIN_OBSERVATIONS

    def observe(self, features: StepFeatures, elapsed_ms: float) -> None:
        """Learn from a measured step; steps without a time are ignored."""
        if elapsed_ms <= 0 or not features.num_tokens:
            return
        if self.is_fitted:
            self._follow(features, elapsed_ms)
        self._recent[_size_of(features)].append((features, elapsed_ms))
        self._new.append((_terms(features), elapsed_ms))
        self.num_observations += 1
        if features.num_tokens > _HINGES[-1]:
            self._num_long_observations += 1
            self.prompt_token_ms = elapsed_ms / features.num_tokens
        if self.num_observations <= 2 * _MIN_OBSERVATIONS or self.num_observations % _REFIT_EVERY == 0:
            self._fit()
            self._follow_again()

    def predict_ms(self, features: StepFeatures) -> float:
        """Expected time of a step in milliseconds; 0 before any fit."""
        return self._usual_ms(features) * math.exp(self._pace[_size_of(features)])

    def forget_pace(self) -> None:
        """What follows is not of the mood of the last steps."""
        self._pace = [0.0] * len(self._pace)
        for steps in self._recent:
            steps.clear()

    def prefers(self, shared: StepFeatures, apart: StepFeatures) -> bool:
        """True if reading shared spans once is expected to be no slower than each request reading for itself."""
        if apart.kv_tokens_read - shared.kv_tokens_read >= CERTAIN_SAVED_TOKENS:
            return True
        return self.predict_ms(shared) <= self.predict_ms(apart)

    def max_chunk(self, base: StepFeatures, start: int, limit: int, budget_ms: float) -> int:
        """The most prompt tokens, from position ``start``, that can join ``base`` within ``budget_ms`` (0..limit)."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            trial = msgspec.structs.replace(base)
            trial.add(start, middle, samples=True)
            if self.predict_ms(trial) <= budget_ms:
                low = middle
            else:
                high = middle - 1
        return low

    def tokens_worth_a_step(self) -> float | None:
        """Prompt tokens whose computing, in a step that has more than ``_HINGES`` tokens anyhow, takes as long as the
        smallest step (one token of one request); infinite if such tokens were seen to cost nothing.

        None before it ``knows_prompts``.
        """
        if not self.knows_prompts:
            return None
        fixed_ms = self._usual_ms(_SMALLEST_STEP)
        _, per_token, _, _, per_read, per_pair, *_ = self._coefficients
        linear, square = (
            per_token + 1e-3 * per_read,
            0.5e-6 * per_pair,
        )  # n tokens: linear * n + square * n * n
        divisor = linear + math.sqrt(linear * linear + 4 * square * fixed_ms)
        return 2 * fixed_ms / divisor if divisor > 0 else math.inf

    def _usual_ms(self, features: StepFeatures) -> float:
        total: float = sum(map(mul, self._coefficients, _terms(features)))
        return total

    def _follow(self, features: StepFeatures, elapsed_ms: float) -> None:
        """Let the pace of steps of this size follow the error of what was predicted for one."""
        predicted = self.predict_ms(features)
        if predicted > 0:
            error = math.log(elapsed_ms / predicted)
            self._pace[_size_of(features)] += _PACE_GAIN * max(-_PACE_MOST, min(_PACE_MOST, error))

    def _follow_again(self) -> None:
        """The pace that the last steps of each size tell, by the coefficients as they are now."""
        self._pace = [0.0] * len(self._pace)
        for steps in self._recent:
            for features, elapsed_ms in steps:
                self._follow(features, elapsed_ms)

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent on the normal equations, from the last solution."""
        self._take_in()
        coefficients, moment = self._coefficients, self._moment.tolist()
        rows = [(i, row, row[i]) for i, row in enumerate(self._gram.tolist()) if row[i] > 0.0]
        settled = _SETTLED**2 * min(self.num_observations, 1 / (1 - _FORGET))
        for _ in range(_SWEEPS):
            change = 0.0
            for i, row, square in rows:
                before = coefficients[i]
                others = sum(map(mul, row, coefficients)) - square * before
                coefficients[i] = after = max(0.0, (moment[i] - others) / square)
                change += square * (after - before) ** 2
            if change < settled:
                return

    def _take_in(self) -> None:
        """Bring the normal equations up to date with the observations since the last fit."""
        terms = np.array([terms for terms, _ in self._new])
        elapsed = np.array([elapsed for _, elapsed in self._new])
        kept = _FORGET ** np.arange(len(elapsed))[::-1]
        relative = terms / elapsed[:, None]
        self._gram = self._gram * _FORGET ** len(elapsed) + (relative * kept[:, None]).T @ relative
        self._moment = self._moment * _FORGET ** len(elapsed) + kept @ relative
        self._new.clear()


def _size_of(features: StepFeatures) -> int:
    """Which pace a step has."""
    return sum(features.num_tokens > limit for limit in _PACE_LIMITS)


def _terms(features: StepFeatures) -> list[float]:
    tokens = features.num_tokens
    return [
        1.0,
        tokens,
        features.num_requests,
        features.num_sampled,
        features.kv_tokens_read * 1e-3,
        features.attention_pairs * 1e-6,
        features.num_shared_rows,
        *[min(tokens, hinge) for hinge in _HINGES],
        *[float(tokens > jump) for jump in _JUMPS],
    ]
