"""The cost model learns a device it was not told about."""

from __future__ import annotations

import random

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
