"""Work over the rows of a step's logits in parts whose working memory is small."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# On a CPU a part's temporaries stay in the cache, which is several times faster; on a GPU they only stay bounded.
_PART_BYTES = {"cpu": 2 << 20}
_DEFAULT_PART_BYTES = 256 << 20


def row_parts(num_rows: int, row_numbers: int, device: torch.device) -> Iterator[slice]:
    """Slices over ``num_rows`` rows of ``row_numbers`` 4-byte numbers each."""
    step = max(1, _PART_BYTES.get(device.type, _DEFAULT_PART_BYTES) // (4 * row_numbers))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
