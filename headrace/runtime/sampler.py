"""Sampler: from a step's logits to one token a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.reference import sampling as reference_sampling
from headrace.layers.sliced_logits import SlicedLogits
from headrace.runtime.download import start_download
from headrace.runtime.logprobs import LogprobTensors, compute_logprobs
from headrace.runtime.penalties import LogitProcessor
from headrace.runtime.row_parts import row_parts
from headrace.runtime.token_picker import TokenPicker


@dataclass(frozen=True, slots=True, eq=False)
class RandomRows:
    """The rows that are drawn at random: [N] each, on the device. A filter that no row asks for is None.

    rows: int64.  temperature: float32.  key: int64, the noise (``headrace.runtime.noise``).
    top_k: int64, 0 is off; ``max_top_k`` is the largest.  top_p, min_p: float32.
    is_whole_batch: every row of the step is random.
    """

    rows: Tensor
    temperature: Tensor
    key: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    max_top_k: int
    is_whole_batch: bool

    @property
    def is_filtered(self) -> bool:
        """Whether some row has a filter."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """What the rows of one step ask for; the other rows take their best token.

    processors: changes to the logits, in order.
    random: the rows to draw, or None.
    logprob_rows: [N] int64 on the host, rows whose log-probabilities are wanted, or None;
        num_logprobs: [N] how many of the best.
    """

    processors: list[LogitProcessor] = field(default_factory=list)
    random: RandomRows | None = None
    logprob_rows: np.ndarray | None = None
    num_logprobs: list[int] = field(default_factory=list)

    @property
    def reads_whole_rows(self) -> bool:
        """Whether a row asks for more than its best token or one drawn without filters."""
        is_filtered = self.random is not None and self.random.is_filtered
        return bool(self.processors) or self.logprob_rows is not None or is_filtered


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    """The step's tokens, on the device.

    token_ids: [R] int64 (int32 where they were packed), valid ids even for broken rows.
    best_logits: [R] float32, the largest logit of each row after all masks. Not finite means that the row is broken:
        NaN or +inf in the model's logits, or -inf if nothing is allowed.
    logprobs: of the rows ``SamplingBatch.logprob_rows``, or None.
    """

    token_ids: Tensor
    best_logits: Tensor
    logprobs: LogprobTensors | None

    def start_download(self) -> SamplerOutput:
        """The same on the host, once the device gets there."""
        logprobs = self.logprobs.start_download() if self.logprobs is not None else None
        return SamplerOutput(start_download(self.token_ids), start_download(self.best_logits), logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """Tokens that reach the host in one copy.

    packed: [2, R or more] int32 on the device: token ids, and the bits of each row's largest logit (float32).
    count: R.
    """

    packed: Tensor
    count: int

    @classmethod
    def pack(cls, token_ids: Tensor, best_logits: Tensor) -> PackedTokens:
        """Of [R] int32 and [R] float32."""
        return cls(torch.stack((token_ids, best_logits.view(torch.int32))), len(token_ids))

    def first(self, count: int) -> PackedTokens:
        """Of the first rows."""
        return PackedTokens(self.packed, count)

    def start_download(self) -> SamplerOutput:
        """What they are, on the host, once the device gets there."""
        host = start_download(self.packed)
        if self.count < host.shape[1]:
            host = host[:, : self.count]
        token_ids, best_logits = host.unbind()
        return SamplerOutput(token_ids, best_logits.view(torch.float32), None)


class Sampler:
    """Masks and penalties, then the best token or one drawn at random; log-probabilities of the raw logits.

    A row's token does not depend on the other rows. Nothing is computed that no row asks for.

    Args:
        kernels: a ``sampling`` module of ``headrace.kernels``.
    """

    def __init__(self, kernels: Any = reference_sampling) -> None:
        self._kernels = kernels
        self._picker = TokenPicker(kernels)

    def sample(self, logits: SlicedLogits, batch: SamplingBatch) -> SamplerOutput:
        """Sample every row. Ranks gather whole rows only for a step in which a row needs its own."""
        if logits.slices is None or batch.reads_whole_rows:
            return self(logits.whole(), batch)
        best_logits, tokens = self._picker.best(logits)
        random = batch.random
        if random is not None:
            rows = random.rows
            drawn = self._picker.draw(
                logits if random.is_whole_batch else logits.select(rows),
                best_logits.index_select(0, rows),
                random.temperature,
                random.key,
            )
            tokens.index_copy_(0, rows, drawn)
        return SamplerOutput(tokens, best_logits, None)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Sample every row of whole logits.

        Args:
            logits: [R, V] float32; changed in place when there are processors.
        """
        raw, rows = logits, None
        if batch.logprob_rows is not None:
            if len(batch.logprob_rows) < len(logits):
                rows = torch.from_numpy(batch.logprob_rows).to(logits.device)
                raw = logits.index_select(0, rows)
            elif batch.processors:
                raw = logits.clone()
        for processor in batch.processors:
            processor.apply(logits)
        best_logits, tokens = self._kernels.row_argmax(logits)
        if batch.random is not None:
            self._draw(logits, best_logits, tokens, batch.random)
        logprobs = None
        if batch.logprob_rows is not None:
            own = tokens if rows is None else tokens.index_select(0, rows)
            logprobs = compute_logprobs(raw, own, batch.num_logprobs, self._kernels)
        return SamplerOutput(tokens, best_logits, logprobs)

    def _draw(self, logits: Tensor, best_logits: Tensor, tokens: Tensor, random: RandomRows) -> None:
        """Overwrite the random rows of ``tokens``."""
        for part in row_parts(len(random.rows), logits.shape[1], logits.device):
            rows = random.rows[part]
            drawn = self._kernels.sample_rows(
                logits[part] if random.is_whole_batch else logits.index_select(0, rows),
                best_logits[part] if random.is_whole_batch else best_logits.index_select(0, rows),
                random.temperature[part],
                random.key[part],
                None if random.top_k is None else random.top_k[part],
                None if random.top_p is None else random.top_p[part],
                None if random.min_p is None else random.min_p[part],
                random.max_top_k,
            )
            tokens.index_copy_(0, rows, drawn)
