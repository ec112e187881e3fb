"""Every op has a reference, and the table refuses what it does not know."""

from __future__ import annotations

import importlib

import pytest
import torch

from headrace.errors import ConfigError
from headrace.kernels.registry import OP_FILES, Ops
from headrace.parallel.state import SoloCommunicator


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_every_op_is_there(device: str, kernels: str) -> None:
    ops = Ops.for_device(device, kernels)
    for name in Ops.__annotations__:
        assert callable(getattr(ops, name)) and ops.table[name] is getattr(ops, name)


def test_reference_kernels_are_the_reference_functions() -> None:
    ops = Ops.for_device("cpu", "reference")
    for name, stem in OP_FILES.items():
        module = importlib.import_module(f"headrace.kernels.reference.{stem}")
        assert getattr(ops, name) is getattr(module, name)


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="'auto', 'native' or 'reference'; got 'fast'"):
        Ops.for_device("cpu", "fast")


def test_an_op_must_have_an_implementation() -> None:
    table = dict(Ops.for_device("cpu").table)
    del table["linear"]
    with pytest.raises(AssertionError, match="linear"):
        Ops(table)


def test_collectives_are_those_of_the_communicator() -> None:
    class Doubling(SoloCommunicator):
        def all_reduce(self, x: torch.Tensor) -> None:
            x.mul_(2.0)

    x = torch.ones(2, 3)
    Ops.for_device("cpu", communicator=Doubling()).all_reduce(x)
    assert torch.equal(x, torch.full((2, 3), 2.0))
    Ops.for_device("cpu").all_reduce(x)
    out = torch.zeros(2, 3)
    Ops.for_device("cpu").all_gather(x, out)
    assert torch.equal(out, torch.full((2, 3), 2.0))
