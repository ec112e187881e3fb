"""Whether a prefix is loaded before the engine knows what computing it takes."""

from __future__ import annotations

from typing import Any
from unittest import mock

from headrace.config import SharingConfig
from headrace.core.cost_model import CostModel, StepFeatures
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.engine import cache_tiers


def test_short_steps_do_not_tell_what_a_prompt_takes(monkeypatch: Any) -> None:
    """After a restart only the rests of prompts are computed; what they seem to say of a whole one is a guess."""
    made = mock.Mock()
    monkeypatch.setattr(cache_tiers, "TieredCache", made)
    model = CostModel()
    executor = mock.Mock(**{"kv_cache_specs.return_value": [KVCacheSpec("full", (0,), 64)]})
    cache_tiers.make_tiers(SharingConfig(host_cache_bytes=1 << 20), executor, 16, model)
    recompute_ms = made.call_args.args[3]
    for index in range(40):
        features = StepFeatures()
        features.add(640, 1 + index % 6, samples=True)
        model.observe(features, 4.0)
    assert model.is_fitted and recompute_ms(0, 640) == 0.0
    for index in range(40):
        features = StepFeatures()
        features.add(0, 600 + index, samples=True)
        model.observe(features, 300.0 + index / 2)
    assert 150.0 < recompute_ms(0, 640) < 600.0
