"""The cost model learns a device it was not told about."""

from __future__ import annotations

import math
import random

import pytest

from headrace.core.cost_model import CostModel, StepFeatures


def device_ms(features: StepFeatures) -> float:
    """A made-up device: weights' bytes, rows, logits, KV bytes and attention arithmetic."""
    rows = max(features.num_tokens, 8)
    return (
        4.0
        + 0.11 * rows
        + 0.2 * features.num_sampled
        + 1.5e-4 * features.kv_tokens_read
        + 8e-6 * features.attention_pairs
    )


def random_step(rng: random.Random, max_chunk: int) -> StepFeatures:
    features = StepFeatures()
    for _ in range(rng.randint(0, 32)):
        features.add(rng.randint(10, 2000), 1, samples=True)
    if rng.random() < 0.5 or not features.num_requests:
        features.add(rng.randint(0, 1500), rng.randint(1, max_chunk), samples=rng.random() < 0.3)
    return features


def fitted(num_steps: int = 300, noise: float = 0.03) -> CostModel:
    rng, model = random.Random(0), CostModel()
    for _ in range(num_steps):
        features = random_step(rng, max_chunk=512)
        model.observe(features, device_ms(features) * rng.uniform(1 - noise, 1 + noise))
    return model


def test_predicts_unseen_mixes_within_15_percent_at_p90() -> None:
    model, rng = fitted(), random.Random(1)
    errors = []
    for _ in range(300):
        features = random_step(rng, max_chunk=1500)
        errors.append(abs(model.predict_ms(features) / device_ms(features) - 1))
    assert sorted(errors)[270] <= 0.15


def test_follows_a_device_that_changes() -> None:
    model, rng = fitted(), random.Random(2)
    for _ in range(3000):
        features = random_step(rng, max_chunk=512)
        model.observe(features, 2 * device_ms(features))
    features = random_step(rng, max_chunk=512)
    assert abs(model.predict_ms(features) / (2 * device_ms(features)) - 1) < 0.15


def decodes(rows: int) -> StepFeatures:
    return StepFeatures(rows, rows, rows, 100 * rows, 100.0 * rows)


def test_kernels_that_change_at_some_rows_are_followed() -> None:
    """A step of four rows may take as long as one of sixteen, and one of seventeen half as long again."""
    costs = {
        1: 5.0,
        2: 5.2,
        3: 7.0,
        4: 11.0,
        5: 15.0,
        12: 16.0,
        16: 16.5,
        17: 22.0,
        30: 24.0,
        33: 31.0,
        40: 33.0,
    }
    rng, model = random.Random(0), CostModel()
    for _ in range(600):
        rows = rng.choice(list(costs))
        model.observe(
            StepFeatures(rows, rows, rows, 100 * rows, 100.0 * rows), costs[rows] * rng.uniform(0.97, 1.03)
        )
    for rows, cost in costs.items():
        assert model.predict_ms(StepFeatures(rows, rows, rows, 100 * rows, 100.0 * rows)) == pytest.approx(
            cost, rel=0.15
        )


def test_a_machine_that_is_slow_for_a_while() -> None:
    """Steps of one size tell how the next of that size will go, within a few steps, and nothing of other sizes."""
    model, rng = fitted(), random.Random(3)
    decode, chunk = StepFeatures(2, 2, 2, 900, 900.0), StepFeatures(400, 3, 1, 900, 80_000.0)
    usual = [model.predict_ms(features) for features in (decode, chunk)]
    for _ in range(6):
        model.observe(decode, 1.5 * usual[0] * rng.uniform(0.98, 1.02))
    assert model.predict_ms(decode) == pytest.approx(1.5 * usual[0], rel=0.1)
    assert model.predict_ms(chunk) == pytest.approx(usual[1], rel=0.1)
    model.observe(decode, 50 * usual[0])
    assert model.predict_ms(decode) < 1.5 * usual[0] * 1.5, "one step alone is not believed"
    for _ in range(6):
        model.observe(decode, usual[0])
    assert model.predict_ms(decode) == pytest.approx(usual[0], rel=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_errors_of_the_old_fit_do_not_correct_the_new_one(seed: int) -> None:
    """Decodes alone do not tell what a prompt's tokens cost; a fit that has learned it must be believed at once."""
    rng, model = random.Random(seed), CostModel()
    for length in range(40):
        model.observe(decodes(1 + length % 2), 4.0)
    ratios = []
    for number in range(24):
        num_tokens = rng.randint(100, 600)
        chunk, ms = StepFeatures(num_tokens, 12, 12, 2 * num_tokens, 40.0 * num_tokens), 5 + 0.4 * num_tokens
        if number >= 8:
            ratios.append(model.predict_ms(chunk) / ms)
        model.observe(chunk, ms)
    assert min(ratios) > 0.7 and max(ratios) < 1.5, ratios


def test_max_chunk_is_the_largest_that_fits() -> None:
    model, base = fitted(), StepFeatures()
    for _ in range(16):
        base.add(500, 1, samples=True)
    chunk = model.max_chunk(base, start=100, limit=1400, budget_ms=60.0)
    assert 0 < chunk < 1400
    for size, fits in ((chunk, True), (chunk + 1, False)):
        trial = StepFeatures(base.num_tokens, 16, 16, base.kv_tokens_read, base.attention_pairs)
        trial.add(100, size, samples=True)
        assert (model.predict_ms(trial) <= 60.0) is fits
    assert model.max_chunk(base, 100, 1400, budget_ms=0.1) == 0
    assert model.max_chunk(base, 100, 50, budget_ms=1e9) == 50


def test_is_not_fitted_before_it_has_seen_steps() -> None:
    model = CostModel()
    assert not model.is_fitted
    model.observe(StepFeatures(1, 1, 1, 10, 10), 0.0)
    assert model.num_observations == 0


def model_of(fixed_ms: float, ms_per_token: float, ms_per_pair: float = 0.0, longest: int = 512) -> CostModel:
    """Fitted to steps of decodes with, half of the time, a chunk of a prompt."""
    rng, model = random.Random(0), CostModel()
    for _ in range(300):
        features = random_step(rng, longest)
        pairs_ms = ms_per_pair * features.attention_pairs
        model.observe(features, fixed_ms + ms_per_token * features.num_tokens + pairs_ms)
    return model


@pytest.mark.parametrize(("fixed_ms", "ms_per_token"), [(4.0, 0.025), (4.0, 0.4), (40.0, 0.025)])
def test_tokens_that_take_as_long_as_a_step(fixed_ms: float, ms_per_token: float) -> None:
    tokens = model_of(fixed_ms, ms_per_token).tokens_worth_a_step()
    assert tokens == pytest.approx((fixed_ms + ms_per_token) / ms_per_token, rel=0.05)


def test_attention_counts_in_what_tokens_take() -> None:
    """n tokens attend to n * n / 2 pairs."""
    tokens = model_of(4.0, 0.01, 2e-4).tokens_worth_a_step()
    assert tokens is not None
    assert 0.01 * tokens + 1e-4 * tokens**2 == pytest.approx(4.01, rel=0.05)


def test_decodes_do_not_tell_what_a_prompts_tokens_take() -> None:
    model = model_of(4.0, 0.025, longest=30)
    assert model.is_fitted and model.tokens_worth_a_step() is None


def test_tokens_that_cost_nothing_are_never_worth_a_step() -> None:
    model = CostModel()
    for num_tokens in range(100, 120):
        model.observe(StepFeatures(num_tokens), 5.0)
    tokens = model.tokens_worth_a_step()
    assert tokens is not None and tokens > 10_000
    model._coefficients = [5.0, *[0.0] * (len(model._coefficients) - 1)]
    assert model.tokens_worth_a_step() == math.inf
