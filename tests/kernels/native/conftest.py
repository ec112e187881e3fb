"""Fixtures of the native kernels' tests: skipped where there is no library, repeated for every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.kernels.native.library import NativeLibrary, load_library


def instruction_sets() -> list[str]:
    """Those that were compiled and that this CPU has."""
    loaded = load_library()
    if not isinstance(loaded, NativeLibrary):
        return ["none"]
    best = loaded.instruction_set
    known = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon")
    found = [name for name in known if loaded.choose_instruction_set(name)]
    assert loaded.choose_instruction_set(best)
    return found


@pytest.fixture
def native() -> NativeLibrary:
    """The library."""
    loaded = load_library()
    if not isinstance(loaded, NativeLibrary):
        pytest.skip(loaded)
    return loaded


@pytest.fixture(params=instruction_sets())
def instruction_set(request: pytest.FixtureRequest, native: NativeLibrary) -> Iterator[str]:
    """Each of them in use."""
    before = native.instruction_set
    assert native.choose_instruction_set(request.param)
    yield request.param
    assert native.choose_instruction_set(before)


@pytest.fixture
def threads() -> Iterator[int]:
    """More than one thread, however small the tensors are."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)
