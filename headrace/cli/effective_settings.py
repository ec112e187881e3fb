"""What each setting comes to on this machine and this model, and why. Reads the model's files but no weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.checkpoint import ModelArchitecture, ModelSource, load_architecture, resolve_model
from headrace.checkpoint.load import resolve_max_model_len
from headrace.cli.automatic_choices import chat_choices, weight_choices
from headrace.cli.engine_options import SERVER, EngineSettings
from headrace.cli.preflight import check_model
from headrace.config import EngineConfig, SchedulerConfig, build_section
from headrace.engine.device_defaults import with_device_defaults
from headrace.engine.output_pace import MAX_CHUNKS_PER_S
from headrace.serve.settings import ServerConfig

if TYPE_CHECKING:
    from headrace.platforms.base import Platform


@dataclass(frozen=True)
class EffectiveSetting:
    """One line of ``headrace explain``.

    value: what the engine goes by; ``given`` is the same unless the setting leaves the choice to the engine.
    origin: the flag or file that set it, or "default".
    why: the reason for a value that the engine chose; what the setting means otherwise.
    """

    section: str
    name: str
    given: Any
    value: Any
    origin: str
    why: str


def effective_settings(settings: EngineSettings) -> list[EffectiveSetting]:
    """All settings in the configuration's order. Raises CheckpointError and ConfigError as the engine would."""
    from headrace.platforms.base import current_platform

    config = settings.config
    source = resolve_model(config.model.model, revision=config.model.revision)
    architecture = load_architecture(source)
    check_model(config, architecture, source.name)
    chosen = _Choices(config, source, architecture, current_platform(config.device.device)).all()
    rows = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for option in dataclasses.fields(values):
            given = getattr(values, option.name)
            value, why = chosen.get(option.name, (given, option.metadata["doc"]))
            origin = settings.origins.get(option.name, "default")
            rows.append(EffectiveSetting(section.name, option.name, given, value, origin, why))
    return rows + _server_rows(settings, source)


def _server_rows(settings: EngineSettings, source: ModelSource) -> list[EffectiveSetting]:
    """Those of ``headrace serve``. A key is not shown."""
    server = build_section(ServerConfig, SERVER, settings.server)
    chosen = chat_choices(settings.config, server, source)
    rows = []
    for option in dataclasses.fields(server):
        given = getattr(server, option.name)
        given = "(set)" if given is not None and option.name == "api_key" else given
        value, why = chosen.get(option.name, (given, option.metadata["doc"]))
        origin = settings.origins.get(option.name, "default")
        rows.append(EffectiveSetting(SERVER, option.name, given, value, origin, why))
    return rows


@dataclass(frozen=True)
class _Choices:
    """The values of settings that were left open."""

    config: EngineConfig
    source: ModelSource
    architecture: ModelArchitecture
    platform: Platform

    @cached_property
    def resolved(self) -> SchedulerConfig:
        """The scheduler's section with what depends on the device."""
        return with_device_defaults(self.config).scheduler

    def all(self) -> dict[str, tuple[Any, str]]:
        """{setting: (value, why)} for those that the engine chooses."""
        weights = weight_choices(self.config, self.source, self.architecture, self.platform)
        return {
            **self._of_model(),
            **weights,
            **self._of_machine(),
            **self._of_sharing(),
            **self._of_kv_memory(),
        }

    def _of_sharing(self) -> dict[str, tuple[Any, str]]:
        choices: dict[str, tuple[Any, str]] = {}
        if self.config.sharing.cascade_min_requests is None:
            fewest = with_device_defaults(self.config).sharing.cascade_min_requests
            choices["cascade_min_requests"] = (fewest, self.platform.describe())
        if self.config.sharing.cascade == "auto":
            choices["cascade"] = (
                "per step",
                "by the cost model: a beginning is read together where that is predicted to spare time",
            )
        if self.config.parallel.all_reduce == "auto" and self.config.parallel.tensor_parallel_size == 1:
            choices["all_reduce"] = (None, "one rank has nothing to add up")
        return choices

    def _of_model(self) -> dict[str, tuple[Any, str]]:
        model = self.config.model
        choices: dict[str, tuple[Any, str]] = {"model": (model.model, f"found at {self.source.path}")}
        if model.tokenizer is None and not model.skip_tokenizer_init:
            choices["tokenizer"] = (self.source.path.name, "the model's own")
        if model.served_model_name is None:
            choices["served_model_name"] = (self.source.name, "the model's short name")
        if model.load_format == "auto":
            kind = "gguf" if self.source.kind == "gguf" else "safetensors"
            choices["load_format"] = (kind, "by the model's files")
        length = resolve_max_model_len(model.max_model_len, self.architecture, model.model)
        if model.max_model_len is None:
            choices["max_model_len"] = (length, "the model's own context")
        return choices

    def _of_machine(self) -> dict[str, tuple[Any, str]]:
        from headrace.kernels.registry import kernel_kinds
        from headrace.runtime.attention_library import refuse_library

        config, platform = self.config, self.platform
        where = platform.describe()
        dtype = str(platform.resolve_dtype(config.model.dtype, self.architecture.torch_dtype)).removeprefix(
            "torch."
        )
        choices: dict[str, tuple[Any, str]] = {}
        if config.device.device == "auto":
            choices["device"] = (platform.name, where)
        if config.model.dtype == "auto":
            stored = self.architecture.torch_dtype or "mixed types"
            choices["dtype"] = (dtype, f"the weights are stored in {stored}; {where}")
        if config.cache.kv_cache_dtype == "auto":
            choices["kv_cache_dtype"] = (dtype, "the compute type")
        if config.sharing.tier_cache_dtype == "auto":
            stored = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
            has_tiers = config.sharing.host_cache_bytes > 0
            choices["tier_cache_dtype"] = (
                (stored, "kv_cache_dtype") if has_tiers else (None, "there is no cache tier")
            )
        if config.device.threads is None:
            choices["threads"] = (platform.default_num_threads(), "physical cores that this process may use")
        if platform.name == "cpu":
            refuse_library(config.device.attention_library, config.device.kernels, platform.device)
            choices["max_graph_tokens"] = (0, "a CPU has no graphs")
            choices["attention_library"] = ("off", "it is for NVIDIA GPUs")
        if config.device.kernels == "auto":
            choices["kernels"] = (kernel_kinds(platform.device)[0], where)
        if config.scheduler.max_prefill_chunk is None:
            choices["max_prefill_chunk"] = (self.resolved.max_chunk_tokens, "max_num_batched_tokens")
        return choices | self._of_scheduler(where)

    def _of_scheduler(self, where: str) -> dict[str, tuple[Any, str]]:
        """Those of a server; a batch that runs offline on a GPU knows no longest stall."""
        given, resolved = self.config.scheduler, self.resolved
        choices: dict[str, tuple[Any, str]] = {
            name: (getattr(resolved, name), where)
            for name in ("max_num_seqs", "max_num_batched_tokens", "max_stall_ms", "max_steps_outstanding")
            if getattr(given, name) is None
        }
        if given.stream_interval is None:
            paced = f"as many as keep all streams to {MAX_CHUNKS_PER_S} chunks a second"
            choices["stream_interval"] = (
                resolved.stream_interval,
                where if resolved.stream_interval else paced,
            )
        return choices

    def _of_kv_memory(self) -> dict[str, tuple[Any, str]]:
        """Of one rank. On a GPU it is measured at start, after the weights are in place: nothing to tell before."""
        from headrace.parallel.pipeline import PipelineStage
        from headrace.runtime.kv_cache import kv_cache_specs_for, stored_kv_type
        from headrace.runtime.kv_cache_size import RequestSize, cpu_budget_bytes, num_kv_blocks

        config, arch = self.config, self.architecture
        cache, scheduler = config.cache, self.resolved
        dtype = self.platform.resolve_dtype(config.model.dtype, arch.torch_dtype)
        stored = stored_kv_type(cache.kv_cache_dtype, dtype, arch.head_dim)
        if config.sharing.host_cache_bytes:
            stored_kv_type(config.sharing.tier_cache_dtype, dtype, arch.head_dim, "tier_cache_dtype")
        parallel = config.parallel
        num_kv_heads = max(1, arch.num_kv_heads // parallel.tensor_parallel_size)
        layers = PipelineStage(0, parallel.pipeline_parallel_size).layers(arch.num_layers)
        specs = kv_cache_specs_for(
            arch.layer_windows, num_kv_heads, arch.head_dim, cache.block_size, stored, layers
        )
        length = resolve_max_model_len(config.model.max_model_len, arch, config.model.model)
        size = RequestSize(
            specs, cache.block_size, length, scheduler.max_chunk_tokens * scheduler.steps_outstanding
        )
        is_open = cache.num_kv_blocks is None and cache.kv_cache_bytes is None
        if is_open and self.platform.name != "cpu":
            measured = "measured at start: gpu_memory_utilization less the weights and the largest step"
            return {"kv_cache_bytes": (None, measured), "num_kv_blocks": (None, measured)}
        one_request = size.blocks(length) * size.bytes_per_block
        available = self.platform.available_memory_bytes() // parallel.world_size
        budget = cpu_budget_bytes(available, one_request) if is_open else 0
        count = num_kv_blocks(cache, size, budget, "free memory")
        choices: dict[str, tuple[Any, str]] = {}
        if cache.num_kv_blocks is None:
            choices["num_kv_blocks"] = (count, f"kv_cache_bytes in blocks of {size.bytes_per_block} bytes")
        if cache.kv_cache_bytes is None or cache.num_kv_blocks is not None:
            why = "a share of the memory that is free now" if is_open else "num_kv_blocks"
            choices["kv_cache_bytes"] = (count * size.bytes_per_block, why)
        return choices
