"""AttentionLibrary: long prompt chunks through a library's dense attention, merged by log-sum-exp.

A library makes a plan for every new pair of lengths, so there must be few: a chunk of a prompt becomes a causal square
of a round number of rows over its own keys, and dense rectangles over pieces of its context, the longest length and its
halves. What is left of the context stands in front of the square, behind queries that nobody reads; what is missing to
a round number is zeros at its end, which only rows see that nobody reads.

Legend: T rows of a chunk, S rows of its square, H query heads, K KV heads, D head dim, N keys of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.kernels.triton.library_kernels import (
    MERGED_AT_ONCE,
    PagedKeys,
    Part,
    gather_piece,
    merge_parts,
    stage_chunk,
)
from headrace.kernels.triton.library_thread import Lengths, LibraryThread

LIBRARY_KEY = "library"
"""Where a plan's ``derived`` holds its ``LibraryWork``."""

_COMPILED_KEYS = 16

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]
"""(q [1, H, T, D], k [1, K, N, D], v, whether query i sees keys 0 to i only, scale) -> (result [1, H, T, D] in memory
order [T, H, D], log-sum-exp [H, T] fp32, contiguous, in units of exp). Strided inputs, contiguous in D."""


@dataclass(frozen=True, slots=True)
class LibrarySpan:
    """One request's chunk.

    request: row of the block table.
    first_token, num_rows: the chunk's tokens of the step.
    pieces: lengths of the rectangles, which cover the context from position 0 on.
    num_front: what is left of the context, in front of the square.
    num_square: S.
    num_padded: rows of a rectangle, T and what is missing to a round number.
    """

    request: int
    first_token: int
    num_rows: int
    pieces: tuple[int, ...]
    num_front: int
    num_square: int
    num_padded: int

    def lengths(self) -> list[Lengths]:
        """The library's calls, in order."""
        rectangles = [Lengths(self.num_padded, num_keys, False) for num_keys in self.pieces]
        return [Lengths(self.num_square, self.num_square, True), *rectangles]

    @property
    def is_in_place(self) -> bool:
        """The square's rows are the chunk's own."""
        return self.num_square == self.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class LibraryWork:
    """What a plan leaves to the library."""

    library: AttentionLibrary
    spans: tuple[LibrarySpan, ...]

    def run(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """The spans' rows of ``out``; arguments as those of the attention op."""
        library = self.library

        def body() -> None:
            for span in self.spans:
                keys = PagedKeys(k_cache, v_cache, block_table, span.request)
                library.attend_span(span, qkv, keys, out, scale)

        library.thread.run(body)


class AttentionLibrary:
    """The library's calls of one rank's layers, and the memory that they share.

    Args:
        num_heads, num_kv_heads, head_dim: of each layer.
        block_size: of the cache.
        dtype, device: of queries, keys and values.
        max_rows: that are laid out for a chunk: ``num_front`` and the larger of its square's and rectangles' rows.
        max_piece: the longest piece.
        attend: the library; None: cuDNN.
        usual: see ``LibraryThread``.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_piece: int,
        attend: Attend | None = None,
        usual: Sequence[Lengths] = (),
    ) -> None:
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._block_size = block_size
        self._attend = attend or cudnn_attend
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self._staged = torch.zeros((max_rows, width), dtype=dtype, device=device)
        self._piece = torch.zeros(2 * num_kv_heads * max_piece * head_dim, dtype=dtype, device=device)
        self.device = device
        self.thread = LibraryThread(device, self._make_ready, usual)
        self._is_compiled = False

    @property
    def held_bytes(self) -> int:
        """The shared memory."""
        return self._staged.nbytes + self._piece.nbytes

    @property
    def transient_bytes(self) -> int:
        """What is held beside it at most: parts, what merges carry, and what preparing leaves."""
        num_heads, _, head_dim = self._heads
        parts = (MERGED_AT_ONCE + 1) * (head_dim * self._staged.element_size() + 4)
        return len(self._staged) * num_heads * (parts + 4 * (head_dim + 1))

    def attend_span(
        self, span: LibrarySpan, qkv: torch.Tensor, keys: PagedKeys, out: torch.Tensor, scale: float
    ) -> None:
        """The span's rows of ``out`` [tokens, H*D]. On the library's thread.

        Args:
            qkv: [tokens, (H+2K)*D], keys and values as they are in the cache.
        """
        rows, first_row = qkv, span.first_token
        if not span.is_in_place or qkv.stride(0) != self._staged.stride(0):
            rows, first_row = self._staged, 0
            chunk = (qkv, span.first_token, span.num_rows)
            stage_chunk(rows, span.num_square, *chunk, keys, sum(span.pieces), span.num_front, self._heads[0])
        parts = [self._square(rows, first_row, span.num_square, scale)]
        num_skipped, carry, first_key = span.num_front, None, 0
        for num_keys in span.pieces:
            if len(parts) == MERGED_AT_ONCE:
                carry = merge_parts(parts, num_skipped, span.num_rows, carry)
                parts, num_skipped = [], 0
            gather_piece(self._piece_of(num_keys), keys, first_key)
            first_key += num_keys
            parts.append(self._rectangle(rows, first_row + span.num_front, span.num_padded, num_keys, scale))
        merge_parts(parts, num_skipped, span.num_rows, carry, out, span.first_token)

    def _square(self, rows: torch.Tensor, first_row: int, num_rows: int, scale: float) -> Part:
        num_heads, num_kv_heads, _ = self._heads
        q, k, v = (
            self._columns(rows, first_row, num_rows, *columns)
            for columns in (
                (0, num_heads),
                (num_heads, num_kv_heads),
                (num_heads + num_kv_heads, num_kv_heads),
            )
        )
        return self._part(q, k, v, True, scale)

    def _rectangle(
        self, rows: torch.Tensor, first_row: int, num_rows: int, num_keys: int, scale: float
    ) -> Part:
        """Rows against the piece that was gathered last."""
        k, v = self._piece_of(num_keys)[:, None]
        return self._part(self._columns(rows, first_row, num_rows, 0, self._heads[0]), k, v, False, scale)

    def _part(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> Part:
        result, log_sums = self._attend(q, k, v, is_causal, scale)
        return Part(result[0].transpose(0, 1), log_sums)

    def _columns(
        self, rows: torch.Tensor, first_row: int, num_rows: int, first_head: int, num_heads: int
    ) -> torch.Tensor:
        """[1, heads, rows, D] of rows like qkv's. Strides depend on the lengths alone, since the library's plans do."""
        width, head_dim = rows.stride(0), self._heads[2]
        start = rows.storage_offset() + first_row * width + first_head * head_dim
        return rows.as_strided(
            (1, num_heads, num_rows, head_dim), (num_rows * width, head_dim, width, 1), start
        )

    def _piece_of(self, num_keys: int) -> torch.Tensor:
        """[2, K, N, D]: room for the keys and values of a piece."""
        _, num_kv_heads, head_dim = self._heads
        return self._piece[: 2 * num_kv_heads * num_keys * head_dim].view(2, num_kv_heads, num_keys, head_dim)

    def _make_ready(self, lengths: Lengths) -> None:
        """A call over whatever the shared memory holds; before the first, the kernels around it are compiled."""
        if not self._is_compiled:
            self._compile()
            self._is_compiled = True
        if lengths.is_causal:
            self._square(self._staged, 0, lengths.num_rows, 1.0)
        else:
            self._rectangle(self._staged, 0, lengths.num_rows, lengths.num_keys, 1.0)

    def _compile(self) -> None:
        """Run the kernels around the library's once, over a few numbers."""
        num_heads, num_kv_heads, head_dim = self._heads
        like: dict[str, Any] = {"dtype": self._staged.dtype, "device": self._staged.device}
        cache = torch.zeros((1, num_kv_heads, self._block_size, head_dim), **like)
        table = torch.zeros((1, _COMPILED_KEYS), dtype=torch.int32, device=self._staged.device)
        keys = PagedKeys(cache, cache, table, 0)
        stage_chunk(self._staged, 2, self._staged, 0, 1, keys, 0, 1, num_heads)
        gather_piece(self._piece_of(_COMPILED_KEYS), keys, 0)
        part = Part(
            torch.zeros((1, num_heads, head_dim), **like),
            torch.zeros((num_heads, 1), dtype=torch.float32, device=self._staged.device),
        )
        carry = merge_parts([part], 0, 1, None)
        merge_parts([part], 0, 1, carry, torch.zeros((1, num_heads * head_dim), **like))


def cudnn_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Attend`` by cuDNN, with what torch has of it."""
    result, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    num_heads, num_rows = q.shape[1:3]
    in_rows = result.transpose(1, 2).contiguous()  # no copy: it has the order of the queries, [T, H, D]
    return in_rows.transpose(1, 2), log_sums.reshape(num_heads, num_rows).contiguous()
