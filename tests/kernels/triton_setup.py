"""What tests of Triton kernels share: they run compiled where there is a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

import torch
from triton import knobs

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HALF = torch.bfloat16 if HAS_GPU else torch.float16
"""The 16-bit type to test with: the interpreter's bf16 arithmetic is wrong."""


def _let_scalars_be_range_bounds() -> None:
    """Triton 3.6's interpreter holds scalars as arrays of one number, which numpy 2.4 no longer turns into an int."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not HAS_GPU:
    _let_scalars_be_range_bounds()
assert knobs.runtime.interpret != HAS_GPU, (
    "TRITON_INTERPRET must be set where there is no GPU, and only there"
)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN if any number is."""
    out, reference = out.double(), reference.double().to(out.device)
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))


def max_error(dtype: torch.dtype) -> float:
    """What relative error rounding to ``dtype`` a few times may leave."""
    return {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
