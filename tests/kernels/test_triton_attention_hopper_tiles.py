"""Where the kernel by warps with roles is taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.triton import attention_hopper_tiles as tiles
from headrace.kernels.triton import launch

SHAPE = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
    "has_window": False,
    "has_soft_cap": False,
}


def arguments(
    dtype: torch.dtype = torch.bfloat16,
    cached: torch.dtype = torch.bfloat16,
    first: int = 0,
    num_blocks: int = 9,
) -> tuple[Any, ...]:
    """(qkv, keys, values, output) of two tokens, whose first number is the ``first`` of its memory."""
    qkv = torch.empty(2 * 48 * 128 + first, dtype=dtype)[first:].view(2, 48 * 128)
    cache = torch.empty((num_blocks, 2, 2, 8, 16, 128), dtype=cached, device="meta")
    return qkv, cache[:, 1, 0], cache[:, 1, 1], torch.empty(2, 32 * 128, dtype=dtype)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(launch, "architecture", lambda: 90)


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"head_dim": 64}, False),
        ({"head_dim": 96}, False),
        ({"head_dim": 256}, False),
        ({"block_size": 128}, True),
        ({"block_size": 8}, False),
        ({"block_size": 48}, False),
        ({"block_size": 256}, False),
        ({"num_heads": 128, "num_kv_heads": 1}, True),
        ({"num_heads": 256, "num_kv_heads": 1}, False),
        ({"has_window": True}, False),
        ({"has_soft_cap": True}, False),
        ({"kv_kind": "int8"}, False),
    ],
    ids=str,
)
def test_shapes(change: dict[str, Any], is_taken: bool) -> None:
    assert tiles.takes_hopper(arguments(), SHAPE | change) == is_taken


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({"dtype": torch.float16, "cached": torch.float16}, True),
        ({"dtype": torch.float32, "cached": torch.float32}, False),
        ({"cached": torch.float16}, False),
        ({"first": 4}, False),
        ({"num_blocks": 4_000_000}, True),
        ({"num_blocks": 5_000_000}, False),
    ],
    ids=str,
)
def test_tensors(change: dict[str, Any], is_taken: bool) -> None:
    assert tiles.takes_hopper(arguments(**change), SHAPE) == is_taken


@pytest.mark.parametrize("number", [80, 89, 100, 120])
def test_other_devices(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(launch, "architecture", lambda: number)
    assert not tiles.takes_hopper(arguments(), SHAPE)


def test_the_interpreter_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", True)
    assert not tiles.takes_hopper(arguments(), SHAPE)


def test_it_is_held_back_until_it_is_compiled() -> None:
    with tiles.held_back():
        assert not tiles.takes_hopper(arguments(), SHAPE)
        with tiles.let_through():
            assert tiles.takes_hopper(arguments(), SHAPE)
            with ThreadPoolExecutor(1) as other:
                assert not other.submit(tiles.takes_hopper, arguments(), SHAPE).result()
        assert not tiles.takes_hopper(arguments(), SHAPE)
    assert tiles.takes_hopper(arguments(), SHAPE)


def test_it_is_held_back_until_the_last_of_several_engines_has_it() -> None:
    first, second = tiles.held_back(), tiles.held_back()
    for holder in (first, second):
        holder.__enter__()
    first.__exit__(None, None, None)
    assert not tiles.takes_hopper(arguments(), SHAPE)
    second.__exit__(None, None, None)
    assert tiles.takes_hopper(arguments(), SHAPE)
