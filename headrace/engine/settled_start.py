"""settle: what a start leaves behind is collected once, and what lives on is left out of later collections.

Imports and a loaded model are hundreds of thousands of objects; a full collection over them takes 100 ms on the
engine's thread, and the first steps make enough new ones to bring it about.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

_is_settled = False


def settle(owner: object) -> Callable[[], object]:
    """Once a process: collect, then freeze all objects there are, until the result is called or ``owner`` is gone.

    Then they are collected as others are, so that an engine that was dropped does not keep its memory.
    """
    global _is_settled
    if _is_settled:
        return _nothing
    _is_settled = True
    gc.collect()
    gc.freeze()
    return weakref.finalize(owner, gc.unfreeze)


def _nothing() -> None:
    """There is nothing to take back."""
