"""The structs of csrc/headrace.h, field by field, and the order of its ops."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the float types that kernels take."""

CACHE_TYPES = {"int8": 3, "fp8_e4m3": 4, "fp8_e5m2": 5, "int4": 6, "int5": 7}
"""``HrCacheType``, by the name of the ``KVFormat``."""


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


class LinearArgs(ctypes.Structure):
    """``HrLinear``."""

    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("x_dtype", c_int32),
        ("weight_dtype", c_int32),
        ("bias_dtype", c_int32),
        ("out_dtype", c_int32),
    ]


class PackWeightArgs(ctypes.Structure):
    """``HrPackWeight``."""

    _fields_ = [
        ("rows", c_int64),
        ("weight", c_void_p),
        ("packed", c_void_p),
        ("weight_stride", c_int64),
        ("num_inputs", c_int64),
        ("dtype", c_int32),
        ("unused", c_int32),
    ]


class EmbeddingArgs(ctypes.Structure):
    """``HrEmbedding``."""

    _fields_ = [
        ("rows", c_int64),
        ("ids", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("weight_stride", c_int64),
        ("out_stride", c_int64),
        ("width", c_int64),
        ("first_row", c_int64),
        ("num_table_rows", c_int64),
        ("scale", c_float),
        ("weight_dtype", c_int32),
        ("out_dtype", c_int32),
        ("is_packed", c_int32),
    ]


class GatherRowsArgs(ctypes.Structure):
    """``HrGatherRows``."""

    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("index", c_void_p),
        ("out", c_void_p),
        ("x_stride_bytes", c_int64),
        ("out_stride_bytes", c_int64),
        ("row_bytes", c_int64),
    ]


class Cache(ctypes.Structure):
    """``HrCache``."""

    _fields_ = [
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
        ("words", c_void_p),
        ("words_block_stride", c_int64),
        ("words_head_stride", c_int64),
        ("type", c_int32),
        ("is_turned", c_int32),
    ]


class RopeAndStoreArgs(ctypes.Structure):
    """``HrRopeAndStore``."""

    _fields_ = [
        ("rows", c_int64),
        ("qkv", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("keys", Cache),
        ("values", Cache),
        ("qkv_stride", c_int64),
        ("block_size", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("eps", c_float),
        ("dtype", c_int32),
        ("unused", c_int32),
    ]


class AttentionPlanArgs(ctypes.Structure):
    """``HrAttentionPlan``."""

    _fields_ = [
        ("num_items", c_int64),
        ("num_reductions", c_int64),
        ("query_rows", c_void_p),
        ("row_positions", c_void_p),
        ("item_request", c_void_p),
        ("item_kv_start", c_void_p),
        ("item_kv_end", c_void_p),
        ("item_row_start", c_void_p),
        ("item_num_rows", c_void_p),
        ("item_partial_start", c_void_p),
        ("reduce_rows", c_void_p),
        ("reduce_starts", c_void_p),
        ("reduce_slots", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
        ("partials", c_void_p),
        ("log_sums", c_void_p),
    ]


class AttentionArgs(ctypes.Structure):
    """``HrAttention``."""

    _fields_ = [
        ("rows", c_int64),
        ("qkv", c_void_p),
        ("plan", c_void_p),
        ("out", c_void_p),
        ("keys", Cache),
        ("values", Cache),
        ("qkv_stride", c_int64),
        ("out_stride", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    ]


class GatedActArgs(ctypes.Structure):
    """``HrGatedAct``."""

    _fields_ = [
        ("rows", c_int64),
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("gate_up_stride", c_int64),
        ("out_stride", c_int64),
        ("width", c_int64),
        ("kind", c_int32),
        ("dtype", c_int32),
    ]


class LinearGatedArgs(ctypes.Structure):
    """``HrLinearGated``."""

    _fields_ = [("linear", LinearArgs), ("act", GatedActArgs)]


class SoftCapArgs(ctypes.Structure):
    """``HrSoftCap``."""

    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("stride", c_int64),
        ("width", c_int64),
        ("cap", c_float),
        ("dtype", c_int32),
    ]


class CopyBlocksArgs(ctypes.Structure):
    """``HrCopyBlocks``."""

    _fields_ = [
        ("rows", c_int64),
        ("blocks", c_void_p),
        ("src", c_void_p),
        ("dst", c_void_p),
        ("num_tokens", c_void_p),
        ("block_bytes", c_int64),
        ("num_planes", c_int64),
        ("plane_bytes", c_int64),
        ("token_bytes", c_int64),
    ]


class RowArgmaxArgs(ctypes.Structure):
    """``HrRowArgmax``."""

    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("values", c_void_p),
        ("indices", c_void_p),
        ("stride", c_int64),
        ("width", c_int64),
    ]


class LinearArgmaxArgs(ctypes.Structure):
    """``HrLinearArgmax``."""

    _fields_ = [("linear", LinearArgs), ("argmax", RowArgmaxArgs)]


class DrawArgs(ctypes.Structure):
    """``HrDraw``."""

    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("row_max", c_void_p),
        ("temperature", c_void_p),
        ("keys", c_void_p),
        ("indices", c_void_p),
        ("stride", c_int64),
        ("width", c_int64),
    ]


class TokenMaskArgs(ctypes.Structure):
    """``HrTokenMask``."""

    _fields_ = [
        ("rows", c_int64),
        ("logits", c_void_p),
        ("masked_rows", c_void_p),
        ("words", c_void_p),
        ("num_words", c_int64),
        ("stride", c_int64),
        ("width", c_int64),
    ]


class PackedMatrixStruct(ctypes.Structure):
    """``HrPackedMatrix``."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minimums", c_void_p),
        ("super_scales", c_void_p),
        ("super_minimums", c_void_p),
        ("num_rows", c_int64),
        ("num_blocks", c_int64),
        ("bits", c_int32),
        ("group_columns", c_int32),
        ("scale_kind", c_int32),
        ("reserved", c_int32),
    ]


class LinearPackedArgs(ctypes.Structure):
    """``HrLinearPacked``."""

    _fields_ = [
        ("rows", c_int64),
        ("x", c_void_p),
        ("matrix", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("num_columns", c_int64),
        ("x_dtype", c_int32),
        ("out_dtype", c_int32),
        ("input_bits", c_int32),
        ("reserved", c_int32),
    ]


class EmbeddingPackedArgs(ctypes.Structure):
    """``HrEmbeddingPacked``."""

    _fields_ = [
        ("rows", c_int64),
        ("ids", c_void_p),
        ("matrix", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_columns", c_int64),
        ("first_row", c_int64),
        ("scale", c_float),
        ("out_dtype", c_int32),
    ]


class Patch(ctypes.Structure):
    """``HrPatch``."""

    _fields_ = [("offset", c_int32), ("value", c_int32), ("bytes", c_int64)]


class Call(ctypes.Structure):
    """``HrCall``."""

    _fields_ = [
        ("op", c_int32),
        ("num_patches", c_int32),
        ("args", c_void_p),
        ("patches", ctypes.POINTER(Patch)),
    ]


OPS: tuple[type[ctypes.Structure], ...] = (
    RmsNormArgs,
    LinearArgs,
    PackWeightArgs,
    EmbeddingArgs,
    GatherRowsArgs,
    RopeAndStoreArgs,
    AttentionArgs,
    GatedActArgs,
    SoftCapArgs,
    CopyBlocksArgs,
    RowArgmaxArgs,
    DrawArgs,
    TokenMaskArgs,
    LinearPackedArgs,
    EmbeddingPackedArgs,
    LinearGatedArgs,
    LinearArgmaxArgs,
)
"""The struct of each op, in the order of ``HrOp``."""

OP_NUMBERS = {struct: number for number, struct in enumerate(OPS)}
