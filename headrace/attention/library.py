"""LibraryBackend: the Triton kernels' planner, which leaves long prompt chunks to a library where that is faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata, AttentionPlan
from headrace.attention.triton import TritonBackend
from headrace.attention.triton_work_list import TritonWorkList, build_triton_work_list
from headrace.kernels.triton.library_attention import LIBRARY_KEY, AttentionLibrary, LibrarySpan, LibraryWork
from headrace.kernels.triton.library_thread import Lengths


@dataclass(frozen=True, slots=True)
class LibraryRule:
    """Which chunks a library is faster for, as measured on an H200 (benchmarks/kernels/bench_library_attention.py).

    Attributes:
        min_rows: shorter chunks stay with the paged kernels: there the library is hardly faster.
        min_pairs: query-key pairs of a chunk, at least: below, the host needs longer for the calls than the GPU.
        unit: squares and rectangles have multiples of so many rows and keys, to keep the library's plans few.
        max_piece: the longest rectangle; pieces of context are this and its halves, down to ``unit``.
        max_padding: query-key pairs computed for each one that is wanted, at most. The library is 1.2 times as fast
            a pair.
    """

    min_rows: int = 2048
    min_pairs: int = 24_000_000
    unit: int = 1024
    max_piece: int = 16384
    max_padding: float = 1.15

    def max_rows(self, max_tokens: int) -> int:
        """Rows that ``AttentionLibrary`` lays out at most for a chunk of ``max_tokens``."""
        return self._rounded(max_tokens) + self.unit

    def span(self, request: int, first_token: int, num_rows: int, num_cached: int) -> LibrarySpan | None:
        """How the library computes a chunk after ``num_cached`` tokens; None: the paged kernels are faster."""
        if num_rows < self.min_rows:
            return None
        span = self._lay_out(request, first_token, num_rows, num_cached)
        wanted = num_rows * num_cached + num_rows**2 / 2
        computed = span.num_square**2 / 2 + span.num_padded * sum(span.pieces)
        return span if self.min_pairs <= wanted and computed <= self.max_padding * wanted else None

    def usual(self, max_chunk: int, max_context: int) -> list[Lengths]:
        """What chunks of ``max_chunk`` tokens, the most there are, need in contexts of ``max_context`` tokens at most.

        The likeliest first: what chunks need that follow one another from a prompt's begin on, in that order; then what
        is left for those that begin elsewhere, behind another prompt's end or a cached prefix.
        """
        max_cached, rows = max_context - max_chunk, self._rounded(max_chunk)
        following = [self._lay_out(0, 0, max_chunk, cached) for cached in range(0, max_cached + 1, max_chunk)]
        found = dict.fromkeys(lengths for span in following for lengths in span.lengths())
        if max_cached > 0:
            found[Lengths(rows + self.unit, rows + self.unit, True)] = None
        size = self.max_piece
        while size >= self.unit:
            if size <= max_cached:
                found[Lengths(rows, size, False)] = None
            size //= 2
        return list(found)

    def _lay_out(self, request: int, first_token: int, num_rows: int, num_cached: int) -> LibrarySpan:
        num_front = num_cached % self.unit
        pieces = self._pieces(num_cached - num_front)
        num_square, num_padded = self._rounded(num_front + num_rows), self._rounded(num_rows)
        return LibrarySpan(request, first_token, num_rows, pieces, num_front, num_square, num_padded)

    def _rounded(self, count: int) -> int:
        return -(-count // self.unit) * self.unit

    def _pieces(self, count: int) -> tuple[int, ...]:
        pieces, size = [], self.max_piece
        while count:
            pieces += [size] * (count // size)
            count, size = count % size, size // 2
        return tuple(pieces)


class LibraryBackend(TritonBackend):
    """See ``AttentionBackend``; plans of exact size only, for steps that run op by op.

    The library serves a chunk once it has plans for all of its lengths. Until then, and while it makes others, the
    Triton kernels do, whose results differ in the last bits: a chunk's result depends on when it was computed, and on
    nothing else of its step. Ranks may differ in that, since each decides for its own heads alone.

    Args:
        library: of layers with these heads, without a soft cap, over a cache of the type of their queries.
        rule: which chunks it is faster for.
    """

    def __init__(
        self, shape: AttentionShape, library: AttentionLibrary, rule: LibraryRule | None = None
    ) -> None:
        super().__init__(shape, library.device)
        self._library = library
        self._rule = rule or LibraryRule()

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        spans = self._spans(metadata)
        if not spans:
            return super().plan(metadata)
        plan = self._upload(metadata, self._rest(metadata, spans))
        plan.derived[LIBRARY_KEY] = LibraryWork(self._library, tuple(spans))
        return plan

    def _spans(self, metadata: AttentionMetadata) -> list[LibrarySpan]:
        """Chunks that the library is faster for and has plans for."""
        lengths = np.diff(metadata.query_starts)
        if metadata.window is not None or lengths.max(initial=0) < self._rule.min_rows:
            return []
        is_shared = np.zeros(len(lengths), bool)
        for group in metadata.shared_prefixes:
            is_shared[group.requests] = True
        found = []
        for request in np.flatnonzero((lengths >= self._rule.min_rows) & ~is_shared).tolist():
            num_rows, first = int(lengths[request]), int(metadata.query_starts[request])
            span = self._rule.span(request, first, num_rows, int(metadata.context_lens[request]) - num_rows)
            if span is not None and self._library.thread.has(span.lengths()):
                found.append(span)
        return found

    def _rest(self, metadata: AttentionMetadata, spans: list[LibrarySpan]) -> TritonWorkList:
        """The work list of a step without the rows of the spans, which keeps the numbers of the others."""
        lengths = np.diff(metadata.query_starts)
        is_left = np.ones(int(metadata.query_starts[-1]), bool)
        for span in spans:
            lengths[span.request] = 0
            is_left[span.first_token : span.first_token + span.num_rows] = False
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        work = build_triton_work_list(replace(metadata, query_starts=starts), self._rows, self._split)
        tokens = np.flatnonzero(is_left)
        for name in ("query_rows", "reduce_rows"):
            work.arrays[name] = tokens[work.arrays[name]]
        return work
