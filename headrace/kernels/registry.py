"""Ops: the table of named operations that models are written in, resolved once for a device.

An op is a function over tensors and plain numbers that writes into buffers it is given. Each lives in
``kernels/<kind>/<file>.py`` under its own name; "reference" (plain torch) has every op and is the oracle of the
others, which take over where they are faster.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from headrace.errors import ConfigError
from headrace.kernels.affine_matrix import AffineMatrix
from headrace.kernels.native.library import NativeLibrary, load_library, warn_once
from headrace.parallel.state import Communicator, SoloCommunicator

Op = Callable[..., None]

OP_FILES = {
    "embedding": "embedding",
    "gather_rows": "embedding",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "linear": "linear",
    "pack_weight": "linear",
    "pack_table": "linear",
    "weight_dtype": "linear",
    "linear_packed": "linear_packed",
    "embedding_packed": "linear_packed",
    "pack_matrix": "linear_packed",
    "rope_and_store": "rope_and_store",
    "attention": "attention",
    "gated_act": "activation",
    "soft_cap": "elementwise",
    "copy_blocks": "copy_blocks",
}
"""{op: file stem}, the same stem in every kind, in tests/kernels and in benchmarks/kernels."""


class Ops:
    """One attribute per op of ``OP_FILES``; see the reference functions for arguments, shapes and dtypes.

    ``pack_weight``, ``pack_table``, ``weight_dtype`` and ``pack_matrix`` are no ops: they are called at loading, for
    the form and the type of a weight that ``linear`` or ``linear_packed`` reads fastest; a table's form suits
    ``embedding``, too.
    Collectives are ops, too, so that they are recorded like the others; see ``Communicator``.
    """

    embedding: Op
    gather_rows: Op
    rms_norm: Op
    add_rms_norm: Op
    linear: Op
    pack_weight: Callable[[torch.Tensor], Any]
    pack_table: Callable[[torch.Tensor], Any]
    weight_dtype: Callable[[torch.dtype, torch.dtype], torch.dtype]
    linear_packed: Op
    embedding_packed: Op
    pack_matrix: Callable[[AffineMatrix], Any]
    rope_and_store: Op
    attention: Op
    gated_act: Op
    soft_cap: Op
    copy_blocks: Op
    all_reduce: Op
    all_gather: Op

    def __init__(self, table: dict[str, Op]) -> None:
        missing = sorted(Ops.__annotations__.keys() - table.keys())
        assert not missing, f"ops without an implementation: {missing}"
        self.table = table
        for name, op in table.items():
            setattr(self, name, op)

    @classmethod
    def for_device(
        cls,
        device: torch.device | str,
        kernels: str = "auto",
        communicator: Communicator | None = None,
    ) -> Ops:
        """The fastest ops for a device ("auto"), plain torch ones ("reference"), or those of csrc/ ("native").

        Args:
            communicator: of the ranks that share the model's layers; None: one rank.

        Raises: ConfigError for another choice of kernels, and for native ones where there are none.
        """
        kinds = kernel_kinds(device, kernels)
        table = {name: _find(name, stem, kinds) for name, stem in OP_FILES.items()}
        group = communicator or SoloCommunicator()
        return cls(table | {"all_reduce": group.all_reduce, "all_gather": group.all_gather})

    def is_fast(self, name: str) -> bool:
        """Whether the op is more than its reference."""
        return not self.table[name].__module__.startswith("headrace.kernels.reference")


_KINDS: dict[str, list[str]] = {"cpu": ["native", "reference"], "cuda": ["triton", "reference"]}


def load_kernels(stem: str, device: torch.device | str, kernels: str = "auto") -> Any:
    """The module ``stem`` of the preferred kind for a device, for functions that are no ops of a model (sampling)."""
    kinds = kernel_kinds(device, kernels)
    found = (_module(kind, stem) for kind in kinds)
    return next(module for module in found if module is not None)


def kernel_kinds(device: torch.device | str, kernels: str = "auto") -> list[str]:
    """Kinds of implementation for a device, the preferred first. Raises as ``Ops.for_device`` does."""
    if kernels not in ("auto", "native", "reference"):
        raise ConfigError(f"kernels must be 'auto', 'native' or 'reference'; got {kernels!r}")
    if kernels == "reference":
        return ["reference"]
    device_type = torch.device(device).type
    kinds = _KINDS.get(device_type, ["reference"])
    if "native" not in kinds:
        if kernels == "native":
            raise ConfigError(
                f"native kernels are for the CPU, but the device is {device_type!r}; set kernels to 'auto'"
            )
        return kinds
    loaded = load_library()
    if isinstance(loaded, NativeLibrary):
        return kinds
    if kernels == "native":
        raise ConfigError(f"there are no native kernels: {loaded}; set kernels to 'auto' or 'reference'")
    warn_once(loaded)
    return [kind for kind in kinds if kind != "native"]


def _find(name: str, stem: str, kinds: list[str]) -> Op:
    for kind in kinds:
        module = _module(kind, stem)
        if hasattr(module, name):
            op: Op = getattr(module, name)
            return op
    raise AssertionError(f"no implementation of op {name} in {kinds}")


def _module(kind: str, stem: str) -> Any | None:
    """The file of one kind, or None where the kind has none of that stem."""
    name = f"headrace.kernels.{kind}.{stem}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
