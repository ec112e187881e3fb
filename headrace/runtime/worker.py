"""Worker: one device with a loaded model, its KV memory and its runner."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from headrace.attention.base import AttentionShape
from headrace.checkpoint import load_architecture, resolve_model
from headrace.checkpoint.load import resolve_max_model_len
from headrace.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import SchedulerOutput
from headrace.core.token_mask import TokenMask
from headrace.kernels.quantized_cache import KV_FORMATS, is_coded
from headrace.kernels.registry import Ops, kernel_kinds, load_kernels
from headrace.kv_transfer.compression import BlockCompression
from headrace.kv_transfer.host_memory import HostMemory
from headrace.loader.tensor_names import dense_bytes
from headrace.models.causal_lm import CausalLM
from headrace.observe.stages import Stages
from headrace.parallel.fused_reduce import make_fused_reduce
from headrace.parallel.world import World
from headrace.platforms.base import current_platform
from headrace.runtime.attention_library import AttentionPlanners, make_attention_library
from headrace.runtime.cache_fingerprint import loaded_fingerprint, weight_settings
from headrace.runtime.cuda_graph import BUCKETS
from headrace.runtime.early_stage_runner import EarlyStageRunner
from headrace.runtime.gpu_budget import GpuBudget
from headrace.runtime.kv_cache import KVCache, KVCacheLayout, kv_cache_specs_for, stored_kv_type
from headrace.runtime.kv_cache_size import RequestSize, cpu_budget_bytes, largest_step, num_kv_blocks
from headrace.runtime.memory_ledger import MemoryLedger
from headrace.runtime.model_loader import LoadedModel, ModelFiles, ModelLoader, Progress, forms_of
from headrace.runtime.model_runner import ModelRunner
from headrace.runtime.plan_compiler import PlanCompiler
from headrace.runtime.step_forms import StepForms
from headrace.runtime.timed_step import TimedStep
from headrace.runtime.weights_update import (
    ROOM_FOR_NEW,
    check_same_forms,
    check_same_type,
    replacement_of,
    replacing,
)

if TYPE_CHECKING:
    from headrace.runtime.kernel_warmup import KernelWarmup

logger = logging.getLogger(__name__)

MAX_LOGITS_BYTES = 64 << 20
"""Of logits at once for log-probabilities of prompts."""

GRAPH_BYTES = 12 << 20
"""Set apart for the graphs of one number of tokens: up to three kinds of steps."""


class Worker:
    """Loads a model onto one device and runs its steps.

    Args:
        model, cache, scheduler, parallel, device: sections of the configuration.
        progress: called with (stage, share done in [0, 1]) while loading.
        world: this rank among others; left out: it is alone.

    Raises:
        CheckpointError: the model's files cannot be read or do not fit together.
        ConfigError: a setting does not suit the model or the device, or memory does not hold one whole request.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        parallel: ParallelConfig,
        device: DeviceConfig,
        progress: Progress | None = None,
        world: World | None = None,
    ) -> None:
        self._world = world = world or World()
        assert world.size == parallel.world_size, (
            "a worker is one rank of all that the configuration asks for"
        )
        self._cache, self._scheduler = cache, scheduler
        self._platform = current_platform(device.device, world.local_rank)
        self._device = self._platform.device
        self._start_bytes = self._platform.available_memory_bytes()
        num_threads = max(1, self._platform.default_num_threads() // world.num_local_ranks)
        torch.set_num_threads(device.threads or num_threads)
        source = resolve_model(model.model, revision=model.revision)
        self._arch = arch = load_architecture(source)
        self._files = ModelFiles(model, source, arch)
        self.max_model_len = resolve_max_model_len(model.max_model_len, arch, model.model)
        self.dtype = self._platform.resolve_dtype(model.dtype, arch.torch_dtype)
        self.kv_dtype = stored_kv_type(cache.kv_cache_dtype, self.dtype, arch.head_dim)
        self._kernels = device.kernels
        self._attention = kernel_kinds(self._device, device.kernels)[0]
        self._max_graph_tokens = device.max_graph_tokens if self._attention == "triton" else 0
        self._ops = Ops.for_device(self._device, device.kernels, world.tensor.communicator)
        self._loader = ModelLoader(world, self._ops, self._device, self.dtype, self.max_model_len)
        self._model: CausalLM | None = None
        self._num_heads = _length(world.tensor.share(arch.num_attention_heads, "attention heads"))
        self._num_kv_heads = _length(world.tensor.kv_share(arch.num_kv_heads))
        self._max_logits_rows = max(1, MAX_LOGITS_BYTES // (4 * arch.vocab_size))
        self._fused_reduce = make_fused_reduce(
            parallel.all_reduce, world.collectives, arch.hidden_size, self.dtype, world.tensor.rank
        )
        self._stages = Stages()
        self._memory = MemoryLedger(self._platform, cache)
        self._memory.planned["weights"] = dense_bytes(arch, self.dtype.itemsize) // world.size
        self._planners = self._make_planners(device)
        self._compiler = PlanCompiler(self._device, in_background=world.size == 1)
        self._load(progress)
        self._specs = kv_cache_specs_for(
            arch.layer_windows,
            self._num_kv_heads,
            arch.head_dim,
            cache.block_size,
            self.kv_dtype,
            world.stage.layers(arch.num_layers),
        )
        self._forms = self._make_forms()
        self._allocate(progress)
        self.loaded_memory_bytes = self._platform.used_memory_bytes()
        self._tell()

    def _load(self, progress: Progress | None) -> None:
        """The weights, and beside them the kernels of a first token."""
        self._warmup = warmup = self._warm_up_kernels()
        with self._stages.time("weights"), self._memory.spending("weights"):
            self._take(self._files, self._loader.load(self._files, progress))
        if warmup is not None:
            with self._stages.time("kernels not ready with the weights"):
                warmup.wait_first_token()

    def _allocate(self, progress: Progress | None) -> None:
        """KV memory of what the largest step leaves, and the runner over it."""
        if progress is not None:
            progress("making room for KV blocks", 0.0)
        with self._stages.time("largest step"), self._memory.watching("activations"):
            self._num_blocks = self._world.smallest(self._size_kv_cache())
        self._memory.planned["KV blocks"] = self._num_blocks * self._specs[0].bytes_per_block
        with self._stages.time("KV blocks"), self._memory.spending("KV blocks"):
            self._runner: ModelRunner | None = self._make_runner(self._num_blocks)
        if isinstance(self._runner, EarlyStageRunner) and self._world.tokens is not None:
            self._runner.expect = self._world.tokens.expect

    def _tell(self) -> None:
        logger.info(
            "%s on %s: %s, %d KV blocks of %d tokens; start: %s; memory: %s",
            self._files.source.name,
            self._platform.describe(),
            self.dtype,
            self._num_blocks,
            self._cache.block_size,
            self._stages.describe(),
            self._memory.describe(),
        )

    @property
    def is_asynchronous(self) -> bool:
        """Whether the calls of a step only queue work on the device."""
        return self._device.type == "cuda"

    @property
    def startup_s(self) -> dict[str, float]:
        """Seconds of each stage of the start, in order; kernels compile beside the first of them."""
        return self._stages.seconds

    @property
    def is_compiling(self) -> bool:
        """Whether kernels are being compiled ahead."""
        return self._warmup is not None and not self._warmup.is_done

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """The model's KV groups."""
        return self._specs

    def num_kv_blocks(self) -> int:
        """Blocks that were allocated."""
        return self._num_blocks

    def take_pages(self, lowest: int, highest: int) -> bool:
        """Have memory of the next blocks early (``EarlyPages``). False: there is no more to have."""
        pages = None if self._runner is None else self._runner.kv_cache.early_pages
        return pages is not None and pages.take(lowest, highest)

    def open_host_memory(self, num_bytes: int, dtype: str = "auto") -> HostMemory:
        """Host memory that KV blocks can be copied to and from, beside steps.

        Args:
            num_bytes: of host memory.
            dtype: ``tier_cache_dtype``; blocks that are quantized already stay as they are.

        Raises: ConfigError.
        """
        assert self._runner is not None, "the worker was shut down"
        blocks, stream = self._runner.kv_cache.blocks, self._platform.new_copy_stream()
        return HostMemory(blocks, num_bytes, stream, self._compression(dtype))

    def _compression(self, dtype: str) -> BlockCompression | None:
        if dtype == "auto" or not isinstance(self.kv_dtype, torch.dtype):
            return None
        assert self._runner is not None
        stored_kv_type(dtype, self.dtype, self._arch.head_dim, setting="tier_cache_dtype")
        return BlockCompression(dtype, self._runner.kv_cache.layout, self.kv_dtype)

    def cache_fingerprint(self, dtype: str = "auto") -> bytes:
        """16 bytes of all that the bytes of a KV block depend on in tiers of ``tier_cache_dtype``; random ones when the
        model's files have changed since they were loaded."""
        layout = (self._specs, self._num_kv_heads, self._arch.head_dim, self._cache.block_size)
        types = (self.dtype, self.kv_dtype, self._device.type, kernel_kinds(self._device, self._kernels))
        form = None if (compression := self._compression(dtype)) is None else KV_FORMATS[compression.name]
        parts = (self._files.arch, layout, types, weight_settings(self._files.config), form)
        return loaded_fingerprint(self._files.source.path, self._stamps, parts)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run a step's forward."""
        assert self._runner is not None, "the worker was shut down"
        self._started = self._platform.new_event()
        with self._memory.watching("activations"):
            self._runner.execute_model(scheduler_output, self._started.record)

    def sample_tokens(self, mask: TokenMask | None) -> TimedStep:
        """Sample for it; nothing here waits for the device."""
        assert self._runner is not None, "the worker was shut down"
        with self._memory.watching("activations"):
            pending = self._runner.sample_tokens(mask)
        ended = self._platform.new_event()
        ended.record()
        self._planners.after_step()
        tokens = self._world.tokens
        on_tokens = tokens.send if tokens is not None and self._world.reports else None
        return TimedStep(pending, self._started, ended, self.is_asynchronous, on_tokens)

    def check_weights(self, model: str | None) -> None:
        """Whether the weights of ``model`` (a folder or file; None: those loaded last, as they are now) can replace the
        running ones. Reads headers and changes nothing.

        Raises: CheckpointError for files that are missing or damaged; ConfigError for another model.
        """
        with replacing(model or self._files.source.path, is_intact=True):
            files = replacement_of(self._files, model)
            dtype = self._platform.resolve_dtype(files.config.dtype, files.arch.torch_dtype)
            check_same_type(files, self.dtype, dtype)
            check_same_forms(files, self._weight_forms, forms_of(self._loader.open(files)))

    def update_weights(self, model: str | None, progress: Progress | None = None) -> None:
        """Replace the weights, between steps; requests' states and KV memory stay. The new ones are loaded before the
        old ones are let go of where the device has room for both. ``check_weights`` comes before.

        Raises: CheckpointError, ConfigError, DeviceMemoryError while the old weights are intact and go on;
            EngineDeadError when they are gone: the worker is of no use any more.
        """
        runner = self._runner
        assert runner is not None, "the worker was shut down"
        with replacing(model or self._files.source.path, is_intact=True):
            files = replacement_of(self._files, model)
        has_room = self._platform.available_memory_bytes() > ROOM_FOR_NEW * self._memory.planned["weights"]
        if not has_room:
            self._model = None
            runner.let_go()
            self._compiler.wait()
        with replacing(files.source.path, is_intact=has_room), self._memory.watching("weights"):
            new = self._loader.load(files, progress)
        with replacing(files.source.path, is_intact=False):
            self._take(files, new)
            self._forms.install(new.model, runner)
        self.loaded_memory_bytes = self._platform.used_memory_bytes()
        logger.info("the weights are those of %s now", files.source.path)

    def _take(self, files: ModelFiles, new: LoadedModel) -> None:
        self._files, self._model = files, new.model
        self._weight_forms, self.weight_bytes_read = new.forms, new.num_bytes_read
        self._stamps = new.stamps

    def shutdown(self) -> None:
        """Let go of the model and the KV memory."""
        self._runner = self._model = None
        self._compiler.wait()
        self._planners.close()

    def _make_runner(self, num_blocks: int) -> ModelRunner:
        """A runner over fresh KV memory of so many blocks."""
        arch, size = self._arch, self._cache.block_size
        layout = KVCacheLayout.for_specs(self._specs, self._num_kv_heads, arch.head_dim, size, self.kv_dtype)
        kv_cache = KVCache(self._specs, layout, num_blocks, self._device, self._ops.copy_blocks)
        assert self._model is not None
        make_runner = ModelRunner if self._world.stage.is_last else EarlyStageRunner
        runner = make_runner(
            self._model,
            kv_cache,
            [self._planners.make() for _ in self._specs],
            max_num_seqs=self._scheduler.max_seats,
            max_model_len=self.max_model_len,
            vocab_size=arch.vocab_size,
            max_logits_rows=self._max_logits_rows,
            sampling_kernels=load_kernels("sampling", self._device, self._kernels),
        )
        self._forms.install(self._model, runner)
        return runner

    def _make_planners(self, config: DeviceConfig) -> AttentionPlanners:
        heads = (self._num_heads, self._num_kv_heads, self._arch.head_dim)
        is_half = self.kv_dtype == self.dtype != torch.float32
        shape = AttentionShape(*heads, is_coded(self.dtype, self.kv_dtype), is_half)
        with self._memory.watching("activations"):
            library = make_attention_library(
                config.attention_library,
                self._arch,
                shape,
                kernels=self._attention,
                device=self._device,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                block_size=self._cache.block_size,
                max_chunk=min(self._scheduler.max_chunk_tokens, self.max_model_len),
                max_context=self.max_model_len,
            )
        return AttentionPlanners(self._attention, shape, self._device, self._world.size, library)

    def _make_forms(self) -> StepForms:
        return StepForms(
            world=self._world,
            platform=self._platform,
            kernels=self._kernels,
            attention=self._attention,
            specs=self._specs,
            planners=self._planners,
            max_step_tokens=self._scheduler.max_step_tokens,
            max_seats=self._scheduler.max_seats,
            max_model_len=self.max_model_len,
            max_logits_rows=self._max_logits_rows,
            max_graph_tokens=self._max_graph_tokens,
            is_windowed=any(self._arch.layer_windows),
            fused_reduce=self._fused_reduce,
            compiler=self._compiler,
            warmup=self._warmup,
            memory=self._memory,
        )

    def _warm_up_kernels(self) -> KernelWarmup | None:
        """Begin to compile what steps need; of packed weights only what the user's settings say."""
        if self._attention != "triton":
            return None
        from headrace.runtime.kernel_warmup import KernelWarmup, widths_of

        exchange = None if self._fused_reduce is None else self._fused_reduce.exchange
        widths = widths_of(
            self._arch,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            tensor_parallel_size=self._world.tensor.size,
            block_size=self._cache.block_size,
            dtype=self.dtype,
            is_whole=self._world.size == 1 or (exchange is not None and self._world.stage.num_stages == 1),
            kv_dtype=self.kv_dtype,
            num_slices=self._world.tensor.size if self._world.tensor.keeps_slices else 1,
            precision=self._files.precision,
            layers=self._world.stage.layers(self._arch.num_layers),
        )
        return KernelWarmup(widths, self._device, exchange=exchange)

    def _size_kv_cache(self) -> int:
        in_flight = self._scheduler.max_chunk_tokens * self._scheduler.steps_outstanding
        size = RequestSize(self._specs, self._cache.block_size, self.max_model_len, in_flight)
        if self._cache.num_kv_blocks is not None or self._cache.kv_cache_bytes is not None:
            return num_kv_blocks(self._cache, size, 0, "")
        if self._device.type == "cpu":
            one_request_bytes = size.blocks(self.max_model_len) * size.bytes_per_block
            available = self._platform.available_memory_bytes() // self._world.num_local_ranks
            budget_bytes = cpu_budget_bytes(available, one_request_bytes)
            return num_kv_blocks(
                self._cache, size, budget_bytes, "a share of free memory; kv_cache_bytes overrides it"
            )
        budget = self._gpu_budget()
        if budget.room_bytes < budget.share_bytes:
            logger.warning("gpu_memory_utilization gives more than others leave: %s", self._memory.describe())
        return num_kv_blocks(
            self._cache,
            size,
            budget.num_bytes,
            "gpu_memory_utilization",
            lambda needed, fits: f"{self._memory.describe()}; {budget.fix(needed, fits)}",
        )

    def _gpu_budget(self) -> GpuBudget:
        """What may be used of the GPU, by what the engine holds now and what the largest step needs beside."""
        platform = self._platform
        num_tokens = min(self._scheduler.max_step_tokens, self.max_model_len)
        blocks = -(-num_tokens // self._cache.block_size)
        platform.reset_peak_memory()
        before = platform.used_memory_bytes()
        runner = self._make_runner(blocks * len(self._specs))
        output = largest_step(num_tokens, blocks, len(self._specs))
        runner.execute_model(output)
        runner.sample_tokens().finish()
        platform.synchronize()
        self._planners.after_sizing()
        step_bytes = platform.peak_memory_bytes() - before + self._planners.transient_bytes
        del runner
        graph_bytes = GRAPH_BYTES * sum(size <= self._max_graph_tokens for size in BUCKETS)
        self._memory.planned |= {
            "activations": step_bytes + self._planners.held_bytes,
            "graphs": graph_bytes,
        }
        return GpuBudget(
            total_bytes=platform.total_memory_bytes(),
            start_bytes=self._start_bytes,
            free_bytes=platform.available_memory_bytes(),
            step_bytes=step_bytes,
            graph_bytes=graph_bytes,
            utilization=self._cache.gpu_memory_utilization,
        )


def _length(part: slice) -> int:
    return int(part.stop - part.start)
