"""Warming up runs what a model runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.quantized_cache import KV_FORMATS
from headrace.kernels.triton import attention, packed_warmup, warmup
from headrace.kernels.triton.attention_tiles import LaunchShape, short_launch
from headrace.kernels.triton.linear_packed import linear_packed
from headrace.kernels.triton.model_widths import LayerForms, ModelWidths, PackedForm
from headrace.kernels.triton.warmup import decode_calls, first_token_calls, warm_up
from headrace.kernels.triton.warmup_caches import small_caches
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for
from tests.kernels.triton_setup import DEVICE, HALF

WIDTHS = ModelWidths(
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=200,
    block_size=16,
    dtype=HALF,
    has_qk_norm=True,
    windows=(None, 32),
)


def test_every_call_runs_and_is_timed() -> None:
    for calls in (first_token_calls(WIDTHS, DEVICE), decode_calls(WIDTHS, DEVICE)):
        report = warm_up(calls, num_threads=1)
        assert report.seconds.keys() == calls.keys() and report.total_s >= max(report.seconds.values())


@pytest.mark.parametrize(("head_dim", "is_there"), [(16, False), (80, True)])
def test_attention_of_many_decodes_is_warmed_up_where_its_launch_differs(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, is_there: bool
) -> None:
    launches = []

    def spy(*args: Any, **options: bool) -> LaunchShape:
        launches.append(short_launch(*args, **options))
        return launches[-1]

    monkeypatch.setattr(attention, "short_launch", spy)
    calls = decode_calls(dataclasses.replace(WIDTHS, head_dim=head_dim, windows=(None,)), DEVICE)
    names = [name for name in calls if name.startswith("attention")]
    for name in names:
        calls[name]()
    assert len(names) == 1 + is_there
    assert [launch.num_resident for launch in launches] == [None, 8][: len(names)]


def test_packed_weights_have_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*args: Any, **options: Any) -> None:
        asked.append(args[0].shape)
        if len(args[0]) == 1:
            linear_packed(*args, **options)

    monkeypatch.setattr(packed_warmup, "linear_packed", spy)
    monkeypatch.setattr(warmup, "embedding", None)  # a packed one has another kernel
    form = PackedForm(4, 32, has_minimums=True)
    for packed in (form, PackedForm(8, None, has_minimums=False)):
        widths = dataclasses.replace(
            WIDTHS,
            layer_forms=(LayerForms.all_in(packed),),
            embedding_form=PackedForm(8, 32, False),
            head_form=PackedForm(8, 32, False),
            has_qkv_bias=True,
            num_layers=2,
        )
        asked.clear()
        first, decode = first_token_calls(widths, DEVICE), decode_calls(widths, DEVICE)
        assert "decode_stack" not in decode and not any(name.startswith("linear") for name in decode)
        for call in (first | decode).values():
            call()
        assert {count for count, _ in asked} == {1, 16, 64, 257}
        assert {width for _, width in asked} == {64, 96}


@pytest.mark.parametrize("name", ["int8", "fp8_e5m2", "int4"])
def test_quantized_caches_are_written_and_read(name: str) -> None:
    widths = dataclasses.replace(WIDTHS, kv_type=KV_FORMATS[name], windows=(None,))
    calls = first_token_calls(widths, DEVICE) | decode_calls(widths, DEVICE)
    names = [call for call in calls if call.startswith(("attention", "rope"))]
    assert len(names) == 3
    for call in names:
        calls[call]()


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [24, 128])
def test_small_caches_are_laid_out_as_the_models(name: str, head_dim: int) -> None:
    forms = KV_FORMATS[name]
    specs = kv_cache_specs_for([None], 3, head_dim, 16, forms)
    cache = KVCache(specs, KVCacheLayout.for_specs(specs, 3, head_dim, 16, forms), 2)
    small = small_caches(forms, 3, 16, head_dim, torch.device("cpu"))
    for ours, theirs in zip(small, cache.layer_views(0), strict=True):
        for made, held in ((ours.codes, theirs.codes), (ours.words, theirs.words)):
            assert (made.shape, made.stride(), made.dtype) == (held.shape, held.stride(), held.dtype)
            assert made.storage_offset() == held.storage_offset()
        assert (ours.format, ours.is_turned) == (theirs.format, theirs.is_turned)


def test_few_kernels_stand_before_the_first_token() -> None:
    assert len(first_token_calls(dataclasses.replace(WIDTHS, windows=(None,)), DEVICE)) <= 8


def test_an_error_is_not_swallowed() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        warm_up({"bad": fail})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "fp8_e4m3"])
def test_warm_kernels_compile_no_more(name: str) -> None:
    kv_type = KV_FORMATS.get(name)
    widths = ModelWidths(
        1024, 3072, 16, 8, 128, 151936, 16, torch.bfloat16, has_qk_norm=True, kv_type=kv_type
    )
    for make in (first_token_calls, decode_calls):
        warm_up(make(widths, DEVICE))
        assert warm_up(make(widths, DEVICE)).total_s < 0.2
