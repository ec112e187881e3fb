"""A kernel is compiled anew where only the methods of its constants have changed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from headrace.kernels.triton import packed_ring_config, row_of_codes, weight_ring
from headrace.kernels.triton.decode_stack_config import StackConfig
from headrace.kernels.triton.packed_config import PackedConfig
from headrace.kernels.triton.packed_ring_config import PackedRingConfig
from headrace.kernels.triton.source_digest import digest_of
from headrace.kernels.triton.weight_ring import RingConfig


def test_a_change_of_any_file_changes_it(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.py", "b.py")]
    for path in paths:
        path.write_text("1")
    before = digest_of(*map(str, paths))
    assert digest_of(*map(str, paths)) == before
    paths[1].write_text("2")
    assert digest_of(*map(str, paths)) != before


def test_constants_print_theirs() -> None:
    """By which Triton tells kernels apart."""
    sizes = (8, 8, 8, 8)
    stack = StackConfig(1, 64, 4, 2, 32, 16, True, False, False, 16, 16, 4)
    for config in (
        stack,
        RingConfig(16, 256, 3, sizes, sizes),
        PackedRingConfig(16, 1024, 3, sizes, sizes),
        PackedConfig(256, 4, 32, 16, 16, 16, has_minimums=False, has_bias=False),
    ):
        assert len(config.sources) == 16 and config.sources in repr(config)


def test_the_ring_knows_its_ptx() -> None:
    files = (packed_ring_config.__file__, row_of_codes.__file__, weight_ring.__file__)
    assert PackedRingConfig(16, 1024, 3, (8,) * 4, (8,) * 4).sources == digest_of(*files)
