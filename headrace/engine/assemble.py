"""Puts an engine core together from the configuration. The only place that sees all sections at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from headrace.checkpoint import load_architecture, resolve_model
from headrace.config import EngineConfig, ParallelConfig
from headrace.core.cost_model import CostModel
from headrace.core.interfaces import Executor
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.scheduler import Scheduler
from headrace.engine.cache_tiers import make_tiers
from headrace.engine.constraints import Constraints
from headrace.engine.device_defaults import cascade_floor, with_device_defaults
from headrace.engine.engine_core import EngineCore
from headrace.engine.grammar_vocabulary import load_grammar_vocabulary
from headrace.parallel.launch import LaunchPlace
from headrace.parallel.sizes import check_sizes


def build_engine_core(
    config: EngineConfig,
    progress: Callable[[str, float], None] | None = None,
    *,
    is_offline: bool = False,
) -> EngineCore:
    """Load the model, reserve KV memory and return an engine core ready for requests.

    Args:
        progress: called with (stage, share done in [0, 1]) while loading.
        is_offline: nobody watches the answers grow; only how fast the whole batch is counts.

    Raises: CheckpointError, ConfigError.
    """
    from headrace.runtime.executor import InProcessExecutor
    from headrace.runtime.multiproc_executor import MultiprocExecutor

    config = with_device_defaults(config, is_offline=is_offline)
    if config.parallel.world_size == 1:
        return assemble(config, InProcessExecutor.from_config(config, progress))
    check_ranks(config)
    place = launch_place(config.parallel)
    if place is not None and place.rank:
        serve_rank(place)
    return assemble(config, MultiprocExecutor(config, progress, place))


def launch_place(parallel: ParallelConfig) -> LaunchPlace | None:
    """This process's place in an external launch; None where the engine starts its ranks itself.

    Raises: ConfigError when the launcher's variables are missing or do not suit the sizes.
    """
    if parallel.launcher == "spawn" or parallel.world_size == 1:
        return None
    place = LaunchPlace.read(os.environ)
    place.check_size(parallel.world_size)
    return place


def serve_rank(place: LaunchPlace) -> NoReturn:
    """On ranks other than 0: be a rank of rank 0's engine, and end this process with it."""
    from headrace.runtime.external_ranks import serve_external_rank

    status = serve_external_rank(place)
    sys.stderr.flush()
    os._exit(status)  # not by way of the interpreter's end: communicators would wait for ranks that are gone


def check_ranks(config: EngineConfig) -> None:
    """Refuse numbers of ranks that do not suit the model, before any is started. Raises ConfigError."""
    source = resolve_model(config.model.model, revision=config.model.revision)
    check_sizes(load_architecture(source), config.parallel, source.name)


def assemble(config: EngineConfig, executor: Executor) -> EngineCore:
    """An engine core over a given executor."""
    cost_model = CostModel()
    tiers = make_tiers(config.sharing, executor, config.cache.block_size, cost_model)
    specs = executor.kv_cache_specs()
    kv = KVCacheManager(
        specs,
        executor.num_kv_blocks(),
        config.cache.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        min_copy_tokens=config.cache.min_copy_tokens,
        tier=tiers,
    )
    if tiers is not None:
        tiers.attach(kv)
    constraints = Constraints(
        partial(load_grammar_vocabulary, config.model),
        max_compile_s=config.structured.max_grammar_compile_s,
        jump_forward=config.structured.enable_jump_forward,
    )
    scheduler = Scheduler(
        config.scheduler,
        kv,
        sharing=config.sharing,
        tier=tiers,
        cost_model=cost_model,
        cascade_floor=cascade_floor(config.device.device, specs, config.cache.block_size),
        num_micro_batches=min(config.parallel.pipeline_parallel_size, config.scheduler.steps_outstanding),
    )
    return EngineCore(scheduler, executor, mask_source=constraints, tiers=tiers, seed=config.model.seed)
