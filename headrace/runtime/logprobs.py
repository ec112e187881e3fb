"""Log-probabilities of tokens: of the raw softmax of the model's logits, before masks, penalties and temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.core.output import TokenLogprobs
from headrace.kernels.reference import sampling as reference_sampling
from headrace.runtime.download import start_download
from headrace.runtime.row_parts import row_parts
from headrace.sampling_params import MAX_LOGPROBS

WHOLE_VOCABULARY = -1


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """Log-probabilities of N rows, on the device.

    num_top: [N], on the host: top tokens wanted per row; ``WHOLE_VOCABULARY`` is all.
    tokens: [N] int64, each row's own token.  logprobs: [N] float32, its log-probability.
    ranks: [N] int64, 1 is the most likely.
    top_tokens, top_logprobs: [N, K], falling; K is 0, or ``MAX_LOGPROBS`` and up.
    whole_tokens, whole_logprobs: [rows that want all, V], falling.
    """

    num_top: list[int]
    tokens: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    whole_tokens: Tensor
    whole_logprobs: Tensor

    def start_download(self) -> LogprobTensors:
        """The same on the host, once the device gets there."""
        return LogprobTensors(
            self.num_top,
            *(start_download(getattr(self, name)) for name in self.__dataclass_fields__ if name != "num_top"),
        )

    def to_host(self) -> list[TokenLogprobs]:
        """One entry a row."""
        tokens, logprobs, ranks = self.tokens.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        top_ids, top_values = self.top_tokens.tolist(), self.top_logprobs.tolist()
        whole = iter(zip(self.whole_tokens.tolist(), self.whole_logprobs.tolist(), strict=True))
        entries = []
        for row, count in enumerate(self.num_top):
            if count == WHOLE_VOCABULARY:
                ids, values = next(whole)
            else:
                ids, values = top_ids[row][:count], top_values[row][:count]
            entries.append(TokenLogprobs([tokens[row], *ids], [logprobs[row], *values], ranks[row]))
        return entries


def compute_logprobs(
    logits: Tensor, tokens: Tensor, num_top: list[int], kernels: Any = reference_sampling
) -> LogprobTensors:
    """Log-probabilities of each row's token and of the best ones.

    Args:
        logits: [N, V] float32, not changed.
        tokens: [N] int64.
        num_top: [N] top tokens wanted per row; -1 is the whole vocabulary.
        kernels: a ``sampling`` module of ``headrace.kernels``.
    """
    most = max(num_top)
    count = min(max(most, MAX_LOGPROBS), logits.shape[1]) if most > 0 else 0
    own = logits.gather(1, tokens[:, None])
    parts = [
        _part_of(logits[part], own[part, 0], count, kernels)
        for part in row_parts(len(logits), logits.shape[1], logits.device)
    ]
    normalizers, ranks, values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    rows = [row for row, wanted in enumerate(num_top) if wanted == WHOLE_VOCABULARY]
    whole = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    whole_values, whole_ids = kernels.top_tokens(logits[whole], logits.shape[1])
    return LogprobTensors(
        num_top=num_top,
        tokens=tokens,
        logprobs=(own - normalizers)[:, 0],
        ranks=ranks,
        top_tokens=ids,
        top_logprobs=values - normalizers,
        whole_tokens=whole_ids,
        whole_logprobs=whole_values - normalizers[whole],
    )


def _part_of(logits: Tensor, own: Tensor, count: int, kernels: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normalizers [N, 1], ranks [N], top values [N, count], top tokens [N, count]) of some rows."""
    ranks = kernels.token_ranks(logits, own)
    if count:
        values, ids = kernels.top_tokens(logits, count)
    else:
        values, ids = logits[:, :0], ranks[:, None][:, :0]
    return kernels.log_normalizer(logits)[:, None], ranks, values, ids
