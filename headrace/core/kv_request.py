"""What the KV cache manager remembers of one request, kept in ``Request.lock``."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headrace.core.radix_tree import TOKEN_BYTES, RadixNode
from headrace.core.request import Request

NEVER = 1 << 62


@dataclass(eq=False, repr=False, slots=True)
class RequestBlocks:
    """The manager's state of one request, from its first match or admission until it is freed.

    tokens: the known tokens as uint32 bytes, kept while it waits so that each new match need not convert them.
    node: end of the locked path, which holds the first ``num_inserted`` blocks; None until it is admitted.
    num_inserted: full blocks that are in the tree.
    num_same: its first blocks that are the tree's own, in every full group; later ones may be duplicates.
    num_taken: blocks a group that the data plane has been told of.
    first_kept: {window of sliding groups: first block not yet released}.
    wake_tokens: ``commit`` has nothing to do until so many tokens are committed.
    """

    tokens: bytes = b""
    node: RadixNode | None = None
    is_admitted: bool = False
    num_inserted: int = 0
    num_same: int = 0
    num_taken: int = 0
    first_kept: dict[int, int] = field(default_factory=dict)
    wake_tokens: int = NEVER

    def token_bytes(self, request: Request, max_tokens: int) -> bytes:
        """The request's first ``max_tokens`` tokens as uint32 bytes."""
        token_ids = request.token_ids
        if len(self.tokens) != len(token_ids) * TOKEN_BYTES:
            self.tokens = array("I", token_ids).tobytes()
        return self.tokens[: max_tokens * TOKEN_BYTES]


def held_blocks(request: Request) -> RequestBlocks:
    """The state of a request that is admitted."""
    held = request.lock
    assert isinstance(held, RequestBlocks) and held.is_admitted, (
        f"request {request.request_id} holds no blocks"
    )
    return held
