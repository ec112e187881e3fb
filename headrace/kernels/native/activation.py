"""gated_act; see kernels/reference/activation.py."""

from __future__ import annotations

import torch

from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.run import check_rows
from headrace.kernels.native.structs import DTYPES, GatedActArgs
from headrace.kernels.reference.activation import GatedActKind

_KINDS: dict[GatedActKind, int] = {"silu": 0, "gelu_tanh": 1}


@native_op(lambda gate_up, *_, **__: 4 * gate_up.numel())
def gated_act(gate_up: torch.Tensor, kind: GatedActKind, out: torch.Tensor) -> GatedActArgs:
    """See the reference."""
    check_rows(gate_up=gate_up, out=out)
    assert gate_up.dtype == out.dtype and gate_up.shape == (out.shape[0], 2 * out.shape[1])
    return GatedActArgs(
        rows=out.shape[0],
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
        gate_up_stride=gate_up.stride(0),
        out_stride=out.stride(0),
        width=out.shape[1],
        kind=_KINDS[kind],
        dtype=DTYPES[out.dtype],
    )
