"""NativeBackend: plans for the C++ attention op of CPUs."""

from __future__ import annotations

from headrace.attention.reference import ReferenceBackend
from headrace.attention.work_list import Tiling


class NativeBackend(ReferenceBackend):
    """See ``AttentionBackend``. An item's keys and values are packed once for all its rows: many rows share that work,
    and a split's worth of keys leaves room for it in a core's cache."""

    tiling = Tiling(tile_rows=256, kv_split_tokens=1024, short_rows=1, short_split_tokens=512)
