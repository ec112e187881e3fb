"""Which settings the bytes of a cached KV block depend on, for tiers that outlive the process.

What changes the numbers of K and V counts; the test of this module wants every setting named here.

* Seen in the files' contents or the architecture: model, revision.
* Taken as they are: load_format; seed, which makes dummy weights, and else only picks tokens; quantization,
  quantization_overrides, linear_inputs and kernels, for weights and inputs that are rounded give other numbers.
* Taken as what they come to: dtype, device, kv_cache_dtype, block_size, tier_cache_dtype.
* Left out, since blocks are named by token ids, whatever text made them: tokenizer, served_model_name,
  skip_tokenizer_init; and all that says which tokens follow: enable_jump_forward, max_grammar_compile_s.
* Left out, since they say how much fits, not what is in it: max_model_len (rotary tables grow with it, and their
  entries stay), kv_cache_bytes, num_kv_blocks, gpu_memory_utilization, host_cache_bytes, disk_cache_path,
  disk_cache_bytes.
* Left out, since they say when a token is computed and along with which others, which changes how sums are rounded as
  traffic itself does, within one process, too: max_num_seqs, max_num_batched_tokens, max_stall_ms, batching, policy,
  max_prefill_chunk, max_steps_outstanding, max_waiting_requests, enable_prefix_caching, min_copy_tokens, cascade,
  cascade_min_tokens, cascade_min_requests, cascade_min_share, max_prefix_length, threads, max_graph_tokens,
  attention_library.
* Left out, since it says when tokens are sent that have been made: stream_interval.
* Left out, since tiers are refused on more than one rank: tensor_parallel_size, pipeline_parallel_size, all_reduce,
  pick_in_parts, launcher, rank_timeout_s, rank_load_timeout_s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.checkpoint.file_stamp import FileStamp
from headrace.config import ModelConfig
from headrace.errors import CheckpointError
from headrace.kv_transfer.fingerprint import fingerprint
from headrace.quant.precision import Precision

logger = logging.getLogger(__name__)


def weight_settings(model: ModelConfig) -> tuple[object, ...]:
    """What decides, beside the files, which numbers the model's layers multiply with. Equal ones have equal reprs."""
    precision = Precision.parse(model.quantization, model.quantization_overrides)
    is_dummy = model.load_format == "dummy"
    return (
        ("dummy", model.seed) if is_dummy else "files",
        precision.form,
        tuple(precision.overrides),
        model.linear_inputs,
    )


def loaded_fingerprint(model: Path, stamps: Mapping[str, FileStamp], parts: tuple[object, ...]) -> bytes:
    """16 bytes of the model's files and of ``parts``. Random ones, which no other engine has, when the files are not
    those any more that were loaded, which had these stamps by path."""
    try:
        found = fingerprint(model, parts)
        for file, stamp in stamps.items():
            stamp.check(file)
    except (OSError, CheckpointError) as error:
        logger.warning("cached blocks on disk serve this engine alone: %s", error)
        return os.urandom(16)
    return found
