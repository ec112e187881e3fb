"""StagedModel: one stage's layers, between the stage before and the one after."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.attention.metadata import ForwardBatch
from headrace.layers.sliced_logits import SlicedLogits
from headrace.parallel.pipeline import PipelineLink
from headrace.runtime.model_runner import Model


class StageBuffers(Protocol):
    """A model that is one stage of several."""

    def stage_buffers(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual), each [T, E]: what a stage hands to the next."""


class StagedModel:
    """Stands in for the model in ``ModelRunner``. Activations cross outside of graphs.

    Args:
        model: what runs, perhaps as graphs.
        buffers: the model itself.
        link: to the neighbours.
    """

    def __init__(self, model: Model, buffers: StageBuffers, link: PipelineLink) -> None:
        self._model = model
        self._buffers = buffers
        self._link = link

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """This stage's hidden states [T, E]; meaningful to the outside on the last stage only."""
        tensors = self._buffers.stage_buffers(batch.num_tokens)
        self._link.receive(tensors)
        hidden = self._model.forward(batch)
        self._link.send(tensors)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> SlicedLogits:
        """See the model; on the last stage only."""
        return self._model.compute_logits(hidden, rows)
