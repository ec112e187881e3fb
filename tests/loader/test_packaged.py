"""The packaged models load whole, fast, and into the same numbers as the ``gguf`` package gives."""

from __future__ import annotations

import resource

import gguf
import numpy as np
import pytest
import torch

from headrace.checkpoint.gguf_file import GGUFFile
from headrace.checkpoint.load import load_architecture
from headrace.checkpoint.packaged import PACKAGED_MODELS
from headrace.checkpoint.source import ModelSource, resolve_model
from headrace.errors import CheckpointError
from headrace.loader.base import open_weights
from headrace.loader.tensor_names import gguf_name

# Measured in quiet: 0.5 and 0.95.
MAX_USER_TIME_S = {"smollm2": 1.5, "gemma3-270m": 3.0}


def user_time_s() -> float:
    """Of this thread: what other programs leave of the cores does not count, nor does the system's clearing of
    pages, which is most of the rest and varies with them."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_utime


@pytest.fixture(params=PACKAGED_MODELS)
def source(request: pytest.FixtureRequest) -> ModelSource:
    try:
        return resolve_model(request.param)
    except CheckpointError as error:
        pytest.skip(str(error))


def test_loads_whole_and_fast(source: ModelSource) -> None:
    arch = load_architecture(source)
    start = user_time_s()
    weights = open_weights(source, arch)
    tensors = {name: weights.get(name).dequantize(torch.float32) for name in weights.names()}
    seconds = user_time_s() - start
    assert weights.unused_names() == [] and weights.bytes_read == weights.total_bytes
    assert all(bool(tensor.sum().isfinite()) for tensor in tensors.values())
    assert seconds < MAX_USER_TIME_S[source.name]


def test_numbers_are_the_packages(source: ModelSource) -> None:
    arch = load_architecture(source)
    weights, file = open_weights(source, arch), GGUFFile.open(source.path)
    parts = ["self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm"]
    for name in [f"model.layers.3.{part}.weight" for part in parts]:
        entry = file.tensors[gguf_name(name, arch)]
        stored = np.fromfile(source.path, np.uint8, entry.num_bytes, offset=entry.offset)
        stored = stored.reshape(entry.shape[0], -1)
        expected = gguf.dequantize(stored, gguf.GGMLQuantizationType(entry.ggml_type)).reshape(entry.shape)
        assert torch.equal(weights.get(name).dequantize(torch.float32), torch.from_numpy(expected)), name
