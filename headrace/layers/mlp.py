"""GatedMLP: down(act(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from headrace.errors import UnsupportedModelError
from headrace.kernels.reference.activation import GatedActKind
from headrace.layers.context import LayerContext
from headrace.layers.linear import ColumnParallelLinear, RowParallelLinear

_KINDS: dict[str, GatedActKind] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class GatedMLP:
    """The feed-forward block of every model here.

    Args:
        ctx: what layers are built from.
        name: the module of the checkpoint; gate_proj, up_proj and down_proj are below it.
        hidden_size, intermediate_size: widths outside and inside.
        hidden_act: the activation, as ``ModelArchitecture`` names it.
        has_bias: whether the three matrices have biases.

    Raises:
        UnsupportedModelError: an unknown activation; the message lists the known ones.
    """

    def __init__(
        self,
        ctx: LayerContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        has_bias: bool,
    ) -> None:
        if hidden_act not in _KINDS:
            raise UnsupportedModelError(
                f"activation '{hidden_act}' of '{name}' is not supported (known: {', '.join(_KINDS)})"
            )
        self._ops = ctx.ops
        self._kind = _KINDS[hidden_act]
        self._gate_up = ColumnParallelLinear(
            ctx,
            [f"{name}.gate_proj", f"{name}.up_proj"],
            hidden_size,
            [intermediate_size, intermediate_size],
            has_bias=has_bias,
        )
        self._down = RowParallelLinear(
            ctx, f"{name}.down_proj", intermediate_size, hidden_size, has_bias=has_bias
        )
        self._inner = ctx.buffer("gate_up", self._gate_up.num_outputs)
        self._activated = ctx.buffer("activated", self._gate_up.num_outputs // 2)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x, out: [T, hidden_size]; may be the same."""
        num_tokens = len(x)
        inner, activated = self._inner.rows(num_tokens), self._activated.rows(num_tokens)
        self._gate_up(x, inner)
        self._ops.gated_act(inner, self._kind, activated)
        self._down(activated, out)
