"""Triton decides when it is first imported, be it by another library, whether kernels run in its interpreter."""

from __future__ import annotations

import os
from pathlib import Path

if not (Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists()):
    os.environ.setdefault("TRITON_INTERPRET", "1")
