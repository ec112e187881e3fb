"""The structs of csrc/headrace.h, field by field, and the order of its ops."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the float types that kernels take."""


class RmsNormArgs(ctypes.Structure):
    """``HrRmsNorm``."""

    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("residual_stride", c_int64),
        ("out_stride", c_int64),
        ("width", c_int64),
        ("eps", c_float),
        ("dtype", c_int32),
    ]


class Patch(ctypes.Structure):
    """``HrPatch``."""

    _fields_ = [("offset", c_int32), ("value", c_int32)]


class Call(ctypes.Structure):
    """``HrCall``."""

    _fields_ = [
        ("op", c_int32),
        ("num_patches", c_int32),
        ("args", c_void_p),
        ("patches", ctypes.POINTER(Patch)),
    ]


OPS: tuple[type[ctypes.Structure], ...] = (RmsNormArgs,)
"""The struct of each op, in the order of ``HrOp``."""

OP_NUMBERS = {struct: number for number, struct in enumerate(OPS)}
