"""RoundedMethod: weights of any stored form, rounded to integers while they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from headrace.kernels.affine_matrix import AffineMatrix
from headrace.quant.base import QuantMethod, Shard, WeightHome
from headrace.quant.packed import PackedMethod
from headrace.quant.precision import Rounding
from headrace.quant.rounding import round_weights
from headrace.quant.unquantized import UNQUANTIZED


@dataclass(frozen=True, slots=True)
class RoundedMethod(PackedMethod):
    """Attributes:
    rounding: to what.
    stored: how the checkpoint holds the matrices.
    """

    rounding: Rounding
    stored: QuantMethod = UNQUANTIZED

    @property
    def form(self) -> str:
        return str(self.rounding)

    def read(self, shard: Shard, home: WeightHome) -> AffineMatrix:
        if self.rounding.group_columns is not None:
            shard.check_groups(self.rounding.group_columns)
        elif shard.num_columns < shard.shape[1]:
            return self._read_of_whole_rows(shard, home)
        return round_weights(self.read_dense(shard, home), self.rounding)

    def _read_of_whole_rows(self, shard: Shard, home: WeightHome) -> AffineMatrix:
        """A rank's columns of rows with one scale each, which is that of the whole row: whatever the number of ranks,
        the numbers are the same. It costs reading the whole rows."""
        whole = replace(shard, columns=slice(0, shard.shape[1]))
        rounded = round_weights(self.read_dense(whole, home), self.rounding)
        codes = rounded.codes[:, shard.columns].contiguous()
        return replace(rounded, codes=codes, group_columns=shard.num_columns)

    def read_dense(self, shard: Shard, home: WeightHome) -> Tensor:
        """The numbers as they are stored, not rounded."""
        return self.stored.read_dense(shard, home)
