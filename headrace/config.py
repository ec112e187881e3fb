"""Settings: frozen sections nested by owner, each field with a default that is right and its reason.

A class of the engine gets its own section, never the whole. ``EngineConfig.from_options`` takes the flat
spelling that the command line and ``LLM(...)`` use (every field name is unique over all sections);
``EngineConfig.load`` reads the nested YAML form. Both refuse unknown keys and name the nearest known one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.config_checks import is_size, size_in_bytes, verify
from headrace.config_file import read_sections
from headrace.errors import ConfigError
from headrace.names import counterpart, unknown_name

DEFAULT_SEATS = 256
DEFAULT_STEP_TOKENS = 2048
DEFAULT_STALL_MS = 250.0
DEFAULT_CASCADE_REQUESTS = 8
"""Of ``SchedulerConfig``, where neither the user nor the device says more (``engine.device_defaults``)."""


def knob(default: Any, doc: str) -> Any:
    """A dataclass field with its one-line documentation, which the command line shows as help."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class ModelConfig:
    """Which weights, in which form."""

    model: str = knob("smollm2", "Hugging Face folder or id, .gguf file, or packaged model name")
    tokenizer: str | None = knob(None, "tokenizer folder or .gguf, when not the model's own")
    revision: str | None = knob(None, "branch, tag or commit of a hub model")
    served_model_name: str | None = knob(None, "name that the API shows; the model's short name by default")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = knob(
        "auto", "where weights come from; dummy makes random ones from config.json alone"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "compute type; auto takes the checkpoint's, or the fastest exact one on this CPU"
    )
    quantization: str = knob(
        "auto",
        "form of the weights: auto is the checkpoint's own, none is dense, int8 and int4 round while loading "
        "(int4-g64, int8-channel, int4-g128-zp ... choose groups and zero points)",
    )
    quantization_overrides: str | None = knob(
        None, "forms of modules by pattern, the first match counts: lm_head=int8,model.layers.0.*=none"
    )
    linear_inputs: Literal["auto", "int8", "int16", "float"] = knob(
        "auto",
        "inputs of quantized weights: rounded to 8 or 16 bits, or as they are; auto is int16 on a CPU with kernels",
    )
    max_model_len: int | None = knob(None, "longest prompt plus answer in tokens; the model's own by default")
    skip_tokenizer_init: bool = knob(False, "no tokenizer: prompts and answers are token ids only")
    seed: int = knob(0, "seed of dummy weights and of requests that bring none")


@dataclass(frozen=True)
class CacheConfig:
    """How KV memory is cut and shared."""

    block_size: int = knob(16, "tokens in one KV block; a power of two")
    kv_cache_bytes: int | None = knob(None, "bytes for KV blocks; sized from free memory by default")
    num_kv_blocks: int | None = knob(None, "number of KV blocks; overrides kv_cache_bytes")
    gpu_memory_utilization: float = knob(0.9, "share of the GPU's memory the whole engine may use")
    kv_cache_dtype: Literal[
        "auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2", "int4"
    ] = knob(
        "auto",
        "type of cached keys and values; auto is the compute type, 8 bits and fewer have scales by token and head",
    )
    enable_prefix_caching: bool = knob(True, "reuse the KV of prompts that start alike")
    min_copy_tokens: int = knob(
        4, "a match ending inside a block is copied from this many tokens, else recomputed"
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """What runs in a step, and who waits."""

    max_num_seqs: int | None = knob(
        None, "requests running at once at most; by default 512 on a GPU of 70 GiB or more, else 256"
    )
    max_num_batched_tokens: int | None = knob(
        None, "tokens computed in one step at most; by default 8192 on a GPU of 70 GiB or more, else 2048"
    )
    max_stall_ms: float | None = knob(
        None,
        "a running stream waits no longer than this for a prompt chunk; by default 250, on a CPU 200, and no limit "
        "(.inf) where a GPU answers a batch that nobody watches",
    )
    batching: Literal["continuous", "prefill-first", "static"] = knob(
        "continuous", "prefill-first and static exist for measuring against"
    )
    policy: Literal["fcfs", "priority", "longest-prefix"] = knob(
        "fcfs", "order of waiting requests; priority preempts, longest-prefix starts what is cached first"
    )
    max_prefill_chunk: int | None = knob(
        None, "tokens of one prompt in one step at most; the budget by default"
    )
    max_steps_outstanding: int | None = knob(
        None,
        "steps in flight (D): 1 no overlap, 2 overlap; by default 2 on a GPU, 1 on a CPU, 2 a stage in a pipeline",
    )
    stream_interval: int | None = knob(
        None,
        "steps whose tokens a stream sends together; by default 1 on a GPU, and on a CPU, whose cores also send, as "
        "many as keep all streams to 400 chunks a second, at most those of 40 ms",
    )
    max_waiting_requests: int = knob(4096, "waiting requests; more are refused with a CapacityError")

    @property
    def steps_outstanding(self) -> int:
        """D as a number; 1 where nothing else was said."""
        return self.max_steps_outstanding or 1

    @property
    def max_seats(self) -> int:
        """``max_num_seqs`` as a number: where it was left open, no more than a step has tokens."""
        return self.max_num_seqs or min(DEFAULT_SEATS, self.max_num_batched_tokens or DEFAULT_SEATS)

    @property
    def max_step_tokens(self) -> int:
        """``max_num_batched_tokens`` as a number: where it was left open, at least one for each running request."""
        return self.max_num_batched_tokens or max(DEFAULT_STEP_TOKENS, self.max_num_seqs or 0)

    @property
    def max_chunk_tokens(self) -> int:
        """The most that one prompt gets of a step."""
        return min(self.max_step_tokens, self.max_prefill_chunk or self.max_step_tokens)

    @property
    def stall_limit_ms(self) -> float:
        """``max_stall_ms`` as a number, which may be infinite."""
        return self.max_stall_ms or DEFAULT_STALL_MS


@dataclass(frozen=True)
class SharingConfig:
    """What requests with a common beginning share beside its memory."""

    cascade: Literal["auto", "on", "off"] = knob(
        "auto",
        "read a shared beginning once a step for all its requests; auto where it is worth it, on everywhere",
    )
    cascade_min_tokens: int = knob(256, "auto: shared tokens below which cascade gains nothing")
    cascade_min_requests: int | None = knob(
        None, "auto: requests below which cascade gains nothing; by default 2 on a GPU, 8 on a CPU"
    )
    cascade_min_share: float = knob(
        0.1, "auto: least share of the requests' contexts that they have in common"
    )
    max_prefix_length: int | None = knob(
        None, "tokens of a beginning read together at most; no limit by default"
    )
    host_cache_bytes: int = knob(
        0, "host memory for cached blocks that the device has no room for; 0 is none"
    )
    disk_cache_path: str | None = knob(None, "folder for cached blocks in files, which outlive the process")
    disk_cache_bytes: int = knob(
        16 << 30, "bytes of files in disk_cache_path at most, those of all models together"
    )
    tier_cache_dtype: Literal["auto", "int8", "int4"] = knob(
        "auto",
        "form of blocks in host memory and files: auto is that of the device's, the others are smaller and lossy",
    )

    @property
    def min_requests(self) -> int:
        """``cascade_min_requests`` as a number; the higher of the devices' where it was left open."""
        return self.cascade_min_requests or DEFAULT_CASCADE_REQUESTS


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices, and how the model is cut over them."""

    tensor_parallel_size: int = knob(1, "ranks that share each layer")
    pipeline_parallel_size: int = knob(1, "stages of layers")
    all_reduce: Literal["auto", "library", "one-shot", "fused"] = knob(
        "auto",
        "how GPUs add up: fused with the norm after it in graphs, else in one shot where measured faster, else NCCL; "
        "fused insists; one-shot and library (NCCL) never fuse",
    )
    pick_in_parts: bool = knob(
        True,
        "each rank picks from its part of the vocabulary; logits are gathered only where whole rows are read",
    )
    launcher: Literal["spawn", "external"] = knob(
        "spawn",
        "who starts the ranks: this engine, on this host, or torchrun and the like, through RANK and WORLD_SIZE",
    )
    rank_timeout_s: float = knob(8.0, "a rank that gets nowhere with a step for so long is taken for hung")
    rank_load_timeout_s: float = knob(
        1800.0, "a rank that comes no further for so long, while it loads, is taken for hung"
    )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class DeviceConfig:
    """Where it computes."""

    device: Literal["auto", "cpu", "cuda"] = knob("auto", "cuda when a GPU is there, else cpu")
    threads: int | None = knob(None, "CPU compute threads; the number of physical cores by default")
    kernels: Literal["auto", "native", "reference"] = knob(
        "auto", "reference runs plain torch ops only; native insists on the C++ kernels of a CPU"
    )
    max_graph_tokens: int = knob(1024, "steps up to this many tokens become CUDA graphs; 0 captures none")
    attention_library: Literal["auto", "off", "cudnn"] = knob(
        "auto",
        "attention of long prompt chunks on a GPU: by cuDNN where it is faster (auto), never, or insisted on",
    )


@dataclass(frozen=True)
class StructuredConfig:
    """How constrained answers are computed."""

    enable_jump_forward: bool = knob(
        True, "commit tokens that a grammar forces at once, without a step of their own"
    )
    max_grammar_compile_s: float = knob(10.0, "a constraint that takes longer to compile is refused")


@dataclass(frozen=True)
class EngineConfig:
    """All sections together; only the engine's assembly sees this whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sharing: SharingConfig = field(default_factory=SharingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)

    def __post_init__(self) -> None:
        verify(self, option_owners())

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat names (``block_size=32``). None means "the default".

        Raises: ConfigError for unknown names (with the nearest known one) and for values out of range.
        """
        nested: dict[str, dict[str, Any]] = {}
        owners = option_owners()
        for name, value in options.items():
            if name not in owners:
                raise ConfigError(unknown_option(name, owners))
            if value is not None:
                nested.setdefault(owners[name], {})[name] = value
        return cls.from_dict(nested)

    @classmethod
    def from_dict(cls, nested: dict[str, Any]) -> EngineConfig:
        """Build from {section: {field: value}}, the YAML form. Raises ConfigError as ``from_options`` does."""
        sections = {f.name: f.default_factory for f in dataclasses.fields(cls)}
        built: dict[str, Any] = {}
        for name, values in nested.items():
            if name not in sections:
                raise ConfigError(unknown_name("section", name, sections))
            built[name] = build_section(typing.cast(type, sections[name]), name, values)
        return cls(**built)

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> EngineConfig:
        """Read a YAML file in the nested form; flat ``overrides`` (from the command line) win."""
        return cls.from_sections(read_sections(path), **overrides)

    @classmethod
    def from_sections(cls, nested: dict[str, Any], **overrides: Any) -> EngineConfig:
        """As ``from_dict``, with flat ``overrides`` that win; None is no override."""
        owners = option_owners()
        merged = dict(nested)
        for name, value in overrides.items():
            if name not in owners:
                raise ConfigError(unknown_option(name, owners))
            if value is not None:
                section = merged.get(owners[name], {})
                merged[owners[name]] = {**_settings(owners[name], section), name: value}
        return cls.from_dict(merged)


def unknown_option(name: str, known: Iterable[str]) -> str:
    """A sentence about an option that is none of ours: what does the same here, or the nearest name."""
    instead = counterpart(name)
    return f"{name!r} has no counterpart here: {instead}" if instead else unknown_name("option", name, known)


def option_owners() -> dict[str, str]:
    """{flat option name: section that owns it}, over all sections."""
    owners: dict[str, str] = {}
    for section in dataclasses.fields(EngineConfig):
        for option in dataclasses.fields(typing.cast(Any, section.default_factory)):
            assert option.name not in owners, f"two sections own {option.name}"
            owners[option.name] = section.name
    return owners


def _settings(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"section {name!r} must hold settings; got {values!r}")
    return values


def build_section(section: type, name: str, values: Any) -> Any:
    """A section of settings from {field: value}. Raises ConfigError for unknown names and wrong values."""
    values = _settings(name, values)
    known = {f.name for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(section)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"section {name!r}: {unknown_name('setting', key, known)}")
        values = {**values, key: _checked(key, value, hints[key])}
    return section(**values)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """``value`` if it has the type ``hint``; integers pass as floats, and sizes may be text. Raises ConfigError."""
    if is_size(name) and isinstance(value, str):
        return size_in_bytes(name, value)
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(
            f"{name} is {value!r}, which is not UTF-8; give another, of a file or folder by a link to it"
        )
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option is float and isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise ConfigError(f"{name} is a number of {int(value).bit_length()} bits; lower it") from None
        elif (
            isinstance(option, type)
            and isinstance(value, option)
            and isinstance(value, bool) is (option is bool)
        ):
            return value
    raise ConfigError(f"{name} must be {_spell(options)}; got {value!r}")


def _spell(options: tuple[Any, ...]) -> str:
    words: list[str] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            words += [repr(choice) for choice in typing.get_args(option)]
        else:
            words.append("null" if option is types.NoneType else f"of type {option.__name__}")
    return " or ".join(words)
