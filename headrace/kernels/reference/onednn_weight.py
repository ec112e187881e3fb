"""OneDNNWeight: a matrix of a half-width float type in the order in which oneDNN multiplies with it.

torch's own linear leaves a weight row by row and lets oneDNN look at it anew in each call. In bf16 on two cores with
AMX (benchmarks/kernels/bench_linear.py) the prepared order takes 47 to 90 % of the time at 1 to 128 rows, and as long
as before at 1,024. In fp32 it is slower at one row, which is bound by reading the weight.
"""

from __future__ import annotations

from functools import cache

import torch

_ROWS_PLANNED_FOR = 1
"""The order suits so many rows best: decodes. Any number can be multiplied."""


class OneDNNWeight:
    """A copy of a weight [n, in]; nothing but ``multiply`` reads it.

    Args:
        weight: of a type and device that ``is_supported``.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_PLANNED_FOR)
        # below the op's wrapper in Python, which takes some 5 of the 80 us of a small product
        self._linear = torch.ops.mkldnn._linear_pointwise.default._op

    @staticmethod
    def is_supported(weight: torch.Tensor) -> bool:
        """Whether oneDNN has kernels for the weight's type on this processor; without AVX-512 it has none."""
        return weight.device.type == "cpu" and weight.numel() > 0 and weight.dtype in _supported_types()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] @ weight.T + bias, a new tensor [T, n] of x's type; summed in fp32."""
        product: torch.Tensor = self._linear(x, self._packed, bias, "none", [], "")
        return product

    def dense(self) -> torch.Tensor:
        """The matrix [n, in], a copy."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense


@cache
def _supported_types() -> frozenset[torch.dtype]:
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    found = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_supported in found.items() if is_supported)
