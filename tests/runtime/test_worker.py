"""Worker over tiny models with random weights: loading, sizing, and that scheduling does not change tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.checkpoint import load_architecture, resolve_model
from headrace.config import EngineConfig
from headrace.core.output import SchedulerOutput
from headrace.errors import ConfigError
from headrace.loader.tensor_names import expected_tensors
from headrace.runtime.executor import InProcessExecutor
from headrace.runtime.worker import Worker
from headrace.sampling_params import SamplingParams
from tests.runtime.step_maker import Sequence, StepMaker

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
    },
}
COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@pytest.fixture(params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose random weights are large enough for its tokens to depend on their context."""
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **CONFIGS[request.param]}))
    arch = load_architecture(resolve_model(str(tmp_path)))
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in expected_tensors(arch).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def make_worker(folder: Path, progress=None, **options: Any) -> Worker:
    settings = {
        "device": "cpu",
        "num_kv_blocks": 96,
        "max_num_seqs": 4,
        "block_size": 4,
    }
    config = EngineConfig.from_options(model=str(folder), **{**settings, **options})
    return Worker(
        config.model, config.cache, config.scheduler, config.parallel, config.device, progress=progress
    )


def generate(worker: Worker, chunks: list[int], companions: int = 0, num_output: int = 8) -> list[int]:
    """Tokens after a prompt computed in chunks, with other requests beside it."""
    num_groups = len(worker.kv_cache_specs())
    maker = StepMaker(worker.num_kv_blocks(), 4, num_groups, seed=sum(chunks))
    main = Sequence("main", [(7 * i) % 120 + 3 for i in range(sum(chunks))], SamplingParams(), sample_seed=3)
    others = [Sequence(f"o{i}", [5 + i, 9, 11 + i], SamplingParams(seed=i)) for i in range(companions)]
    tokens: list[int] = []
    for step in range(len(chunks) + num_output - 1):
        batch = [
            (other, other.num_placeholders + len(other.token_ids) - other.num_computed) for other in others
        ]
        batch.insert(len(batch) // 2, (main, chunks[step] if step < len(chunks) else 1))
        worker.execute_model(maker.step(batch))
        output = worker.sample_tokens(None).finish()
        tokens += dict(zip(output.request_ids, output.sampled_token_ids, strict=True)).get("main", [])
    return tokens


def test_chunks_batches_and_block_order_do_not_change_tokens(folder: Path) -> None:
    worker = make_worker(folder)
    alone = generate(make_worker(folder), [13])
    assert len(alone) == 8 and len(set(alone)) > 3
    assert generate(worker, [13], companions=3) == alone
    assert generate(make_worker(folder), [1, 5, 7], companions=2) == alone
    assert generate(make_worker(folder, load_format="dummy"), [13]) != alone


def test_same_through_the_executor_with_steps_outstanding(folder: Path) -> None:
    expected = generate(make_worker(folder), [10])
    worker = make_worker(folder)
    executor = InProcessExecutor(worker, 3)
    maker = StepMaker(executor.num_kv_blocks(), 4, len(executor.kv_cache_specs()))
    main = Sequence("main", [(7 * i) % 120 + 3 for i in range(10)], SamplingParams(), sample_seed=3)
    futures = []
    for count in [10] + [1] * 7:
        executor.execute_model(maker.step([(main, count)]))
        futures.append(executor.sample_tokens(None))
    results = [future.result(30) for future in futures]
    assert [result.sampled_token_ids[0][0] for result in results] == expected
    assert all(result.elapsed_ms > 0 for result in results)
    executor.shutdown()
    executor.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_of_compute_and_cache(folder: Path, dtype: str) -> None:
    worker = make_worker(folder, dtype=dtype, kv_cache_dtype="bfloat16")
    assert (worker.dtype, worker.kv_dtype) == (getattr(torch, dtype), torch.bfloat16)
    half = make_worker(folder, dtype=dtype, kv_cache_dtype="float32").kv_cache_specs()[0].bytes_per_block // 2
    assert worker.kv_cache_specs()[0].bytes_per_block == half
    assert len(generate(worker, [9, 4])) == 8


def test_progress_and_threads(folder: Path) -> None:
    before, seen = torch.get_num_threads(), []
    try:
        make_worker(folder, progress=lambda stage, share: seen.append((stage, share)), threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert seen.pop() == ("making room for KV blocks", 0.0)
    assert seen and seen[-1] == ("loading weights", 1.0)
    assert [share for _, share in seen] == sorted(share for _, share in seen)


def test_default_memory_holds_at_least_one_request(folder: Path) -> None:
    worker = make_worker(folder, num_kv_blocks=None, kv_cache_bytes=None)
    bytes_held = worker.num_kv_blocks() * worker.kv_cache_specs()[0].bytes_per_block
    assert 0 < bytes_held <= 2 << 30
    assert worker.num_kv_blocks() >= len(worker.kv_cache_specs()) * 256 // 4


def test_settings_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="hold 0 tokens of one request, but max_model_len is 256"):
        make_worker(folder, num_kv_blocks=None, kv_cache_bytes=100)
    with pytest.raises(ConfigError, match="max_model_len is 300"):
        make_worker(folder, max_model_len=300)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda"):
            make_worker(folder, device="cuda")


def test_shut_down_workers_do_not_run(folder: Path) -> None:
    worker = make_worker(folder)
    worker.shutdown()
    with pytest.raises(AssertionError, match="shut down"):
        worker.execute_model(SchedulerOutput(1))


def test_a_second_rounding_is_told_once_while_loading(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told, and when, tests/quant/test_overview.py says."""
    make_worker(folder, quantization="int4")
    assert "rounded a second time" not in caplog.text, "these weights are floating-point numbers"
    monkeypatch.setattr("headrace.quant.overview.stored_form", lambda home, name: "Q4_1")
    make_worker(folder, quantization="int4")
    assert caplog.text.count("rounded a second time") == 1
