"""Device figures of ``headrace bench``: how busy it was, and which shares of its limits a run achieved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.checkpoint import ModelArchitecture, ModelSource, load_architecture, resolve_model
from headrace.cli.bench_report import aligned, spread
from headrace.config import EngineConfig
from headrace.engine.step_meter import StepMeter

if TYPE_CHECKING:
    from headrace.runtime.device_limits import DeviceLimits


@dataclass(frozen=True)
class ModelWork:
    """What a model's steps must read and compute at least, on all its devices together.

    layer_weights, head_weights: numbers in the matrices of all layers, of the head.
    pair_flops: of one query token against one key, over all layers and heads.
    itemsize: bytes of a number of the weights, on average.
    """

    layer_weights: int
    head_weights: int
    pair_flops: int
    itemsize: float

    @classmethod
    def of(cls, arch: ModelArchitecture, itemsize: float) -> ModelWork:
        """Of an architecture; sliding layers count as full ones."""
        from headrace.loader.tensor_names import EMBEDDING, expected_tensors

        shapes = expected_tensors(arch)
        matrices = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
        return cls(
            sum(map(math.prod, matrices)),
            math.prod(shapes[EMBEDDING]),
            4 * arch.num_attention_heads * arch.head_dim * arch.num_layers,
            itemsize,
        )

    def num_bytes(self, meter: StepMeter, num_ranks: int) -> float:
        """Weights once a step (the head's where tokens were sampled), keys and values as often as they were read, and
        once for writing them."""
        num_steps = len(meter.device_ms)
        weights = num_steps * self.layer_weights + min(num_steps, meter.num_sampled) * self.head_weights
        kv_tokens = meter.kv_tokens_read + meter.num_tokens
        return weights * self.itemsize + kv_tokens * meter.kv_bytes_per_token * num_ranks

    def num_flops(self, meter: StepMeter) -> float:
        """Of the matrix products and of attention."""
        products = 2 * (self.layer_weights * meter.num_tokens + self.head_weights * meter.num_sampled)
        return products + self.pair_flops * meter.attention_pairs


class DeviceReport:
    """Turns what a ``StepMeter`` saw into figures; the device's limits are measured when it is made."""

    def __init__(self, config: EngineConfig) -> None:
        from headrace.platforms.base import current_platform
        from headrace.runtime.device_limits import measure_limits

        source = resolve_model(config.model.model, revision=config.model.revision)
        arch = load_architecture(source)
        platform = current_platform(config.device.device)
        dtype = platform.resolve_dtype(config.model.dtype, arch.torch_dtype)
        self._work = ModelWork.of(
            arch, _weight_itemsize(config.model.quantization, source, arch, dtype.itemsize)
        )
        self._num_ranks = config.parallel.world_size
        self.name = platform.describe()
        self.limits: DeviceLimits = measure_limits(platform, dtype)

    def figures(self, meter: StepMeter) -> dict[str, Any]:
        """Of one run. Rates are over the time that the device computed, shares of what all devices could do."""
        device_s = max(sum(meter.device_ms) / 1e3, 1e-9)
        bytes_per_s = self._work.num_bytes(meter, self._num_ranks) / device_s
        flops_per_s = self._work.num_flops(meter) / device_s
        return {
            "num_steps": len(meter.device_ms),
            "step_ms": spread(meter.device_ms),
            "device_idle_share": meter.idle_share,
            "host_ms_per_step": meter.host_ms_per_step,
            "bytes_per_s": bytes_per_s,
            "flops_per_s": flops_per_s,
            "bandwidth_share": bytes_per_s / (self._num_ranks * self.limits.bytes_per_s),
            "flops_share": flops_per_s / (self._num_ranks * self.limits.flops_per_s),
        }


def _weight_itemsize(wanted: str, source: ModelSource, arch: ModelArchitecture, dense: int) -> float:
    """Bytes of a number: of weights rounded while loading, of a quantized file, or of dense ones."""
    from headrace.loader.tensor_names import dense_bytes

    if wanted.startswith(("int4", "int8")):
        return int(wanted[3]) / 8
    if wanted == "none" or arch.quantization is None:
        return dense
    files = [source.path] if source.path.is_file() else source.path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) / dense_bytes(arch, 1)


def device_table(results: dict[str, dict[str, Any]]) -> str:
    """Device figures as aligned text, one workload a line."""
    heads = ["workload", "steps", "step ms p50/p90/p99", "idle %", "host ms a step", "bandwidth", "FLOP/s"]
    rows = [heads]
    for name, result in results.items():
        rows.append(
            [
                name,
                f"{result['num_steps']}",
                "/".join(f"{result['step_ms'].get(mark, 0.0):.2f}" for mark in ("p50", "p90", "p99")),
                f"{100 * result['device_idle_share']:.1f}",
                f"{result['host_ms_per_step']:.2f}",
                f"{result['bytes_per_s'] / 1e9:.0f} GB/s ({100 * result['bandwidth_share']:.0f} %)",
                f"{result['flops_per_s'] / 1e12:.2f} T ({100 * result['flops_share']:.0f} %)",
            ]
        )
    return aligned(rows)
