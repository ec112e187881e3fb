"""An engine core that does not come up while a test looks."""

from __future__ import annotations

import time
from typing import Any


def build_slow_core(*arguments: Any, **options: Any) -> Any:
    """Load for a minute."""
    time.sleep(60)
    raise TimeoutError("nobody ended it")
