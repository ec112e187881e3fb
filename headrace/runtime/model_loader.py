"""ModelLoader: one rank's part of a model, read from its files onto the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from headrace.checkpoint import ModelArchitecture, ModelSource
from headrace.checkpoint.file_stamp import FileStamp
from headrace.checkpoint.gguf_types import GGMLType
from headrace.config import ModelConfig
from headrace.kernels.arena import Arena
from headrace.kernels.registry import Ops
from headrace.layers.context import LayerContext
from headrace.loader.base import WeightSource, open_weights
from headrace.loader.tensor_names import matrix_modules
from headrace.models.causal_lm import CausalLM
from headrace.models.registry import build_model
from headrace.parallel.world import World
from headrace.quant.overview import second_rounding
from headrace.quant.precision import Precision

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

StoredForms = Mapping[str, GGMLType | None]
"""Tensor name -> the ggml type of its blocks; None where it is stored dense."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's weights are and how they are to be read: settings, files, and what the files describe."""

    config: ModelConfig
    source: ModelSource
    arch: ModelArchitecture

    @property
    def precision(self) -> Precision:
        """What the settings ask for. Raises ConfigError."""
        config = self.config
        return Precision.parse(config.quantization, config.quantization_overrides, config.linear_inputs)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on the device, the stored bytes that were read for it, the form of each tensor in the files, and what the
    files were."""

    model: CausalLM
    num_bytes_read: int
    forms: StoredForms
    stamps: Mapping[str, FileStamp]


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """What models are built with on one rank: its place, ops, device, compute type and longest sequence in tokens."""

    world: World
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    max_model_len: int

    def open(self, files: ModelFiles, progress: Progress | None = None) -> WeightSource:
        """The weights' files, headers read and checked. Raises CheckpointError, ConfigError."""
        config, told = files.config, None if progress is None else _weight_progress(progress)
        return open_weights(files.source, files.arch, config.load_format, config.seed, told, self.device)

    def load(self, files: ModelFiles, progress: Progress | None = None) -> LoadedModel:
        """Read the weights and build the model.

        Args:
            progress: called with (stage, share done in [0, 1]).

        Raises: CheckpointError, ConfigError; whatever the device says when it has no room.
        """
        weights, stage = self.open(files, progress), self.world.stage
        precision = files.precision
        context = LayerContext(
            ops=self.ops,
            weights=weights,
            dtype=self.dtype,
            device=self.device,
            arena=Arena(self.device),
            parallel=self.world.tensor,
            stage=stage,
            max_model_len=self.max_model_len,
            precision=precision,
        )
        if self.world.rank == 0:  # once, however many ranks there are
            _warn_of_second_rounding(replace(context, quantization=files.arch.quantization), files)
        with torch.inference_mode():
            model = build_model(files.arch, context)
        if stage.is_first and stage.is_last:  # a stage has some of the modules
            precision.check_overrides()
        return LoadedModel(model, weights.bytes_read, forms_of(weights), weights.stamps)


def forms_of(weights: WeightSource) -> StoredForms:
    """How each tensor lies in the files."""
    return {name: weights.ggml_type(name) for name in weights.names()}


def _warn_of_second_rounding(context: LayerContext, files: ModelFiles) -> None:
    # A precision of its own: the model's remembers which modules it was asked for.
    home = replace(context, precision=files.precision).weight_home
    warning = second_rounding(home, matrix_modules(files.arch))
    if warning is not None:
        logger.warning("%s", warning)


def _weight_progress(progress: Progress) -> Callable[[int, int], None]:
    def told(done_bytes: int, total_bytes: int) -> None:
        progress("loading weights", done_bytes / total_bytes if total_bytes else 1.0)

    return told
