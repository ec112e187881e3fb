"""Matrices of a GGUF file, which stay in the file's integers and scales."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from headrace.checkpoint.gguf_types import GGMLType
from headrace.errors import UnsupportedModelError
from headrace.kernels.affine_matrix import AffineMatrix
from headrace.loader.ggml_affine import affine_matrix, is_affine
from headrace.quant.base import QuantMethod, Shard, WeightHome
from headrace.quant.packed import PackedMethod
from headrace.quant.precision import EMBEDDING_ROUNDING
from headrace.quant.rounded import RoundedMethod
from headrace.quant.unquantized import UNQUANTIZED

logger = logging.getLogger(__name__)

_GROUP_COLUMNS = {GGMLType.Q4_K: 256, GGMLType.Q5_K: 256, GGMLType.Q6_K: 256}


@dataclass(frozen=True, slots=True)
class GGUFMethod(PackedMethod):
    """Blocks of one type, taken over exactly.

    Attributes:
        ggml_type: a type that ``is_affine``.
    """

    ggml_type: GGMLType

    @property
    def form(self) -> str:
        return self.ggml_type.name

    def read(self, shard: Shard, home: WeightHome) -> AffineMatrix:
        shard.check_groups(_GROUP_COLUMNS.get(self.ggml_type, 32))
        stored = home.weights.get(f"{shard.name}.weight", (shard.rows, shard.columns), shape=shard.shape)
        if stored.packed is None or stored.packed.ggml_type != self.ggml_type:
            raise UnsupportedModelError(
                f"{stored.where}: '{shard.name}' is not stored as {self.ggml_type.name}"
            )
        return affine_matrix(stored.packed)


def gguf_method(ggml_type: GGMLType | None, home: WeightHome) -> QuantMethod:
    """How to keep a matrix of this type; None: it is dense.

    Types without kernels of their own become integers of 8 bits. Where packed matrices have no fast kernels, all are
    kept dense.
    """
    if ggml_type is None or not home.has_packed_kernels:
        return UNQUANTIZED
    if is_affine(ggml_type):
        return GGUFMethod(ggml_type)
    _warn_once(ggml_type)
    return RoundedMethod(EMBEDDING_ROUNDING)


@cache
def _warn_once(ggml_type: GGMLType) -> None:
    logger.warning(
        "there are no kernels for weights of type %s: they are kept as 8-bit integers, which takes more memory",
        ggml_type.name,
    )
