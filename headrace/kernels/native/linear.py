"""linear over packed weights; see kernels/reference/linear.py for the op and csrc/headrace.h for the form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.native.native_op import native_op
from headrace.kernels.native.run import check_rows, run
from headrace.kernels.native.structs import DTYPES, LinearArgs, PackWeightArgs
from headrace.kernels.native.weight_memory import WEIGHT_MEMORY

PANEL = 16
"""Outputs side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [num_outputs, num_inputs] in panels of 16 outputs.

    data: [panels, num_inputs, 16], or [panels, ceil(num_inputs / 2), 16, 2] in bf16.
    """

    data: torch.Tensor
    num_outputs: int
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """(num_outputs, num_inputs)."""
        return self.num_outputs, self.num_inputs

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers as stored."""
        return self.data.dtype

    def dense(self) -> torch.Tensor:
        """The matrix [num_outputs, num_inputs], a copy."""
        panels = self.data if self.data.dim() == 4 else self.data.unsqueeze(-1)
        rows = panels.permute(0, 2, 1, 3).reshape(panels.shape[0] * PANEL, -1)
        return rows[: self.num_outputs, : self.num_inputs].contiguous()


@native_op(lambda x, weight, *_, **__: weight.num_inputs * weight.num_outputs)
def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, col: int = 0
) -> LinearArgs:
    """See the reference; x and the weight may differ in type. A row's result is bitwise the same in any batch."""
    check_rows(x=x, out=out)
    assert x.shape[1] == weight.num_inputs and col + weight.num_outputs <= out.shape[1]
    assert bias is None or bias.is_contiguous()
    return LinearArgs(
        rows=x.shape[0],
        x=x.data_ptr(),
        weight=weight.data.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr() + col * out.element_size(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        num_inputs=weight.num_inputs,
        num_outputs=weight.num_outputs,
        x_dtype=DTYPES[x.dtype],
        weight_dtype=DTYPES[weight.dtype],
        bias_dtype=0 if bias is None else DTYPES[bias.dtype],
        out_dtype=DTYPES[out.dtype],
    )


def pack_weight(weight: torch.Tensor) -> PackedWeight:
    """A weight [n, in] in panels, of its own type."""
    check_rows(weight=weight)
    num_outputs, num_inputs = weight.shape
    panels = -(-num_outputs // PANEL)
    is_paired = weight.dtype == torch.bfloat16
    shape = (panels, -(-num_inputs // 2), PANEL, 2) if is_paired else (panels, num_inputs, PANEL)
    data = WEIGHT_MEMORY.empty(shape, weight.dtype)
    args = PackWeightArgs(
        rows=num_outputs,
        weight=weight.data_ptr(),
        packed=data.data_ptr(),
        weight_stride=weight.stride(0),
        num_inputs=num_inputs,
        dtype=DTYPES[weight.dtype],
    )
    run(args, data.numel())
    return PackedWeight(data, num_outputs, num_inputs)


def pack_table(weight: torch.Tensor) -> PackedWeight:
    """A weight [n, in] that ``embedding`` reads as well: panels suit both."""
    return pack_weight(weight)


def weight_dtype(stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The type that a weight is kept in: a narrower stored one widens as it is read, with the same result."""
    is_narrower = stored in DTYPES and stored.itemsize < compute.itemsize
    return stored if is_narrower else compute
