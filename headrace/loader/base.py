"""WeightSource: where a model's tensors come from, asked for by name and slice, one at a time.

Layers ask for exactly what they keep: ``weights.get("model.layers.0.mlp.up_proj.weight", (slice(a, b),), shape=...)``
reads rows a..b only. Names are Hugging Face's, in the Hugging Face layout, whatever the file (GGUF's names, its
interleaved query and key rows, and Gemma's norm weights stored without their +1 are settled inside the sources).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from headrace.checkpoint.file_stamp import FileStamp
from headrace.checkpoint.gguf_types import GGMLType
from headrace.checkpoint.model_config import ModelArchitecture
from headrace.checkpoint.source import ModelSource
from headrace.errors import CheckpointError, ConfigError
from headrace.loader.file_bytes import TensorFiles
from headrace.loader.tensor_names import expected_tensors
from headrace.loader.weight_data import PackedBlocks, WeightData

__all__ = ["Index", "PackedBlocks", "Progress", "WeightData", "WeightSource", "open_weights"]

logger = logging.getLogger(__name__)

Index = tuple[slice, ...]
"""Slices with step 1, one for each leading dimension; dimensions that are left out are taken whole."""

Progress = Callable[[int, int], None]
"""Called with (bytes handed out so far, bytes of all tensors)."""


class WeightSource(ABC):
    """The tensors of one model. Sources differ in ``_read``, ``file_of`` and ``label`` only.

    Args:
        where: the folder or file, for errors.
        shapes: Hugging Face name -> whole shape, of every tensor on offer.
        total_bytes: stored size of all of them, for progress.
        is_ignorable: whether a tensor that nothing asked for is no reason to warn.
        progress: told after each ``get``.
        stamps: by ``file_of``, what the files were when their headers were read.

    Attributes:
        bytes_read: stored bytes handed out so far.
    """

    def __init__(
        self,
        where: str,
        shapes: Mapping[str, tuple[int, ...]],
        total_bytes: int,
        is_ignorable: Callable[[str], bool],
        progress: Progress | None = None,
        stamps: Mapping[str, FileStamp] | None = None,
    ) -> None:
        self.where = where
        self._stamps = dict(stamps or {})
        self._files = TensorFiles(self._stamps)
        self.total_bytes = total_bytes
        self.bytes_read = 0
        self._shapes = shapes
        self._is_ignorable = is_ignorable
        self._progress = progress
        self._used: set[str] = set()

    @property
    def stamps(self) -> Mapping[str, FileStamp]:
        """What each file was when its header was read; ``finish`` has seen that it was no other until the end."""
        return self._stamps

    def names(self) -> Iterable[str]:
        """Every tensor's Hugging Face name."""
        return self._shapes.keys()

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape.

        Raises:
            CheckpointError: there is no such tensor.
        """
        shape = self._shapes.get(name)
        if shape is None:
            raise CheckpointError(
                f"{self.where}: tensor {self.label(name)} is missing; there are {len(self._shapes)} others"
            )
        return shape

    def get(
        self,
        name: str,
        index: Index | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        out: Tensor | None = None,
    ) -> WeightData:
        """One tensor, or the slice ``index`` of it; only that much is read from disk.

        Args:
            name: the Hugging Face name.
            index: which part; None is the whole.
            shape: the whole tensor's shape as the model expects it, checked when given.
            out: where a dense tensor of this shape and type may be read to, so that it need not be copied there.

        Raises:
            CheckpointError: the tensor is missing, has another shape, or does not reach as far as ``index``; its file
                was changed since it was opened.
        """
        stored = self.shape(name)
        if shape is not None:
            self.check_shape(name, shape)
        if (stamp := self._stamps.get(file := self.file_of(name))) is not None:
            stamp.check(file)
        data = self._read(name, self._whole_index(name, stored, index or ()), out)
        self._used.add(name)
        self.bytes_read += data.num_bytes
        if self._progress is not None:
            self._progress(self.bytes_read, self.total_bytes)
        return data

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError, naming tensor and file, when the whole tensor has another shape or is missing."""
        stored = self.shape(name)
        if stored != shape:
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {self.label(name)} has shape {list(stored)}, but the model needs "
                f"{list(shape)}"
            )

    def unused_names(self) -> list[str]:
        """Tensors that nothing asked for, but for those known to be of no use."""
        return [name for name in self._shapes if name not in self._used and not self._is_ignorable(name)]

    def finish(self, is_whole: bool = True) -> None:
        """Called once the model is built: lets go of files, completes the progress, warns once of tensors left over.

        is_whole: False when other stages of a pipeline read the rest.

        Raises: CheckpointError when a file was changed meanwhile, so that what was read of it may be of two models.
        """
        for file, stamp in self._stamps.items():
            stamp.check(file)
        self._files.close()
        if self._progress is not None:
            self._progress(self.total_bytes, self.total_bytes)
        unused = self.unused_names()
        if unused and is_whole:
            shown = ", ".join(map(self.label, unused[:5])) + (", …" if len(unused) > 5 else "")
            logger.warning("%s: %d tensors are not used by the model: %s", self.where, len(unused), shown)

    def ggml_type(self, name: str) -> GGMLType | None:
        """The type of the ggml blocks that ``get`` hands out packed; None: this tensor comes dense, or is missing."""
        return None

    def file_of(self, name: str) -> str:
        """The file that holds the tensor, for errors."""
        return self.where

    def label(self, name: str) -> str:
        """The tensor's name as errors show it."""
        return f"'{name}'"

    @abstractmethod
    def _read(self, name: str, index: Index, out: Tensor | None = None) -> WeightData:
        """The part ``index`` (a slice with plain bounds for every dimension) of an existing tensor."""

    def _whole_index(self, name: str, shape: tuple[int, ...], index: Index) -> Index:
        """``index`` with a slice for every dimension and both bounds filled in."""
        assert len(index) <= len(shape), f"{name}: {len(index)} slices for shape {shape}"
        full = []
        for dim, size in enumerate(shape):
            part = index[dim] if dim < len(index) else slice(None)
            assert part.step in (None, 1), f"{name}: slices have step 1"
            start, stop = part.start or 0, size if part.stop is None else part.stop
            if not 0 <= start <= stop <= size:
                raise CheckpointError(
                    f"{self.file_of(name)}: tensor {self.label(name)} has shape {list(shape)}; rows {start} to "
                    f"{stop} of dimension {dim} do not exist"
                )
            full.append(slice(start, stop))
        return tuple(full)


def open_weights(
    source: ModelSource,
    arch: ModelArchitecture,
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> WeightSource:
    """Opens the weights of ``source`` and checks that all tensors of ``arch`` are there in the right shape.

    Args:
        source: the model on disk; not looked at when ``load_format`` is "dummy".
        load_format: "auto" takes what the source is; "dummy" makes random weights from ``arch`` alone.
        seed: of dummy weights.
        progress: told after each tensor.
        device: where dummy weights are made; others are read to the CPU and move when they are dequantized.

    Raises:
        ConfigError: ``load_format`` is not what the source is.
        CheckpointError: a file is missing, cut or corrupt, a tensor is missing or has another shape.
    """
    from headrace.loader.dummy import DummySource
    from headrace.loader.gguf import GGUFSource
    from headrace.loader.safetensors import SafetensorsSource

    if load_format == "dummy":
        return DummySource(arch, seed, device, progress)
    actual = "gguf" if source.kind == "gguf" else "safetensors"
    if load_format not in ("auto", actual):
        raise ConfigError(
            f"load_format='{load_format}' does not fit {source.path}, which holds {actual} weights; use 'auto', "
            f"'{actual}' or 'dummy'"
        )
    opened: type[GGUFSource] | type[SafetensorsSource] = GGUFSource if actual == "gguf" else SafetensorsSource
    weights = opened.open(source.path, arch, progress)
    # The tensors of a checkpoint with quantized linears depend on the method, which asks for what it needs.
    if actual == "gguf" or arch.quantization is None:
        _check_tensors(weights, expected_tensors(arch))
    return weights


def _check_tensors(weights: WeightSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Before anything is loaded: all there, all of the right shape."""
    missing = [name for name in expected if not weights.has(name)]
    if missing:
        shown = ", ".join(map(weights.label, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise CheckpointError(
            f"{weights.where}: {len(missing)} of {len(expected)} tensors are missing: {shown}"
        )
    for name, shape in expected.items():
        weights.check_shape(name, shape)
