"""The setting attention_library: what it refuses, what it chooses, and graphs that wait."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.attention.base import AttentionShape
from headrace.attention.metadata import AttentionMetadata
from headrace.checkpoint import load_architecture, resolve_model
from headrace.config import EngineConfig
from headrace.core.output import EngineCoreRequest
from headrace.engine.assemble import build_engine_core
from headrace.errors import ConfigError
from headrace.kernels.quantized_cache import KV_FORMATS
from headrace.runtime import attention_library, worker
from headrace.runtime.attention_library import AttentionPlanners, make_attention_library, why_not_device
from tests.attention.plain_library import PlainTorch
from tests.e2e.tiny_models import make_model

CUDA = torch.device("cuda", 0)


@pytest.fixture
def arch(tmp_path: Path) -> Any:
    make_model("llama", tmp_path)
    return load_architecture(resolve_model(str(tmp_path)))


def make(setting: Any, arch: Any, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "kernels": "triton",
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "block_size": 16,
        "max_chunk": 2048,
        "max_context": 16384,
    }
    shape = AttentionShape(arch.num_attention_heads, arch.num_kv_heads, arch.head_dim)
    return make_attention_library(setting, arch, shape, **(options | changes))


def test_the_machine_must_suit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that may be missing, in turn, is named."""
    assert "needs an NVIDIA GPU, but the device is 'cpu'" in (
        why_not_device("triton", torch.device("cpu")) or ""
    )
    assert "kernels is 'reference'" in (why_not_device("reference", CUDA) or "")
    found: dict[str, Any] = {"is_available": False, "version": 8907, "capability": (7, 5)}
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: found["is_available"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: found["version"])
    monkeypatch.setattr(attention_library, "compute_capability", lambda device: found["capability"])
    for message, mended in (
        ("needs cuDNN, but torch", {"is_available": True}),
        ("needs cuDNN 9, but torch", {"version": 91000}),
        ("needs compute capability 8.0, but this GPU has 7.5", {"capability": (8, 0)}),
    ):
        assert message in (why_not_device("triton", CUDA) or "")
        found |= mended
    assert why_not_device("triton", CUDA) is None


def test_asking_for_it_where_it_cannot_be_is_refused(arch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"NVIDIA GPU.*set attention_library to 'auto' or 'off'"):
        make("cudnn", arch)
    assert make("auto", arch) is None and make("off", arch) is None
    monkeypatch.setattr(attention_library, "why_not_device", lambda kernels, device: None)
    for changes, message in (
        ({"dtype": torch.float32}, "dtype is float32"),
        ({"kv_dtype": KV_FORMATS["int8"]}, r"not quantized \(kv_cache_dtype 'auto'\)"),
        ({"kv_dtype": torch.float16}, "dtype is bfloat16 and kv_cache_dtype float16"),
        ({"arch": dataclasses.replace(arch, head_dim=256)}, "at most 128 numbers.*they have 256"),
        ({"arch": dataclasses.replace(arch, attn_logit_softcap=30.0)}, "does not cap scores"),
        ({"arch": dataclasses.replace(arch, layer_windows=(20, 20, 20))}, "every layer of this model"),
    ):
        rest: dict[str, Any] = dict(changes)
        changed = rest.pop("arch", arch)
        with pytest.raises(ConfigError, match=message):
            make("cudnn", changed, **rest)
        assert make("auto", changed, **rest) is None


def test_it_is_chosen_where_it_was_measured(arch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    capability = (9, 0)
    monkeypatch.setattr(attention_library, "why_not_device", lambda kernels, device: None)
    monkeypatch.setattr(attention_library, "compute_capability", lambda device: capability)
    assert make("auto", arch) is not None and make("off", arch) is None
    assert make("auto", arch, max_chunk=1024) is None, "no step holds a chunk that is long enough"
    with pytest.raises(ConfigError, match="chunks of 2048 tokens and more, but a step holds at most 1024"):
        make("cudnn", arch, max_chunk=1024)
    capability = (8, 0)
    assert make("auto", arch) is None and make("cudnn", arch) is not None


def test_it_is_left_out_where_the_engines_own_kernel_is_faster(
    arch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from headrace.kernels.triton import attention_hopper_tiles as tiles
    from headrace.kernels.triton import launch

    monkeypatch.setattr(attention_library, "why_not_device", lambda kernels, device: None)
    monkeypatch.setattr(attention_library, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(launch, "architecture", lambda: 90)
    wide = dataclasses.replace(arch, head_dim=128)
    assert make("auto", wide) is None and make("cudnn", wide) is not None
    assert make("auto", dataclasses.replace(arch, head_dim=96)) is not None
    assert make("auto", wide, block_size=8) is not None
    monkeypatch.setattr(launch, "architecture", lambda: 100)
    assert make("auto", wide) is not None


def make_planners(
    arch: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1
) -> tuple[Any, AttentionPlanners]:
    """A library, and planners that leave chunks to it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(attention_library, "why_not_device", lambda kernels, device: None)
    library = make("cudnn", arch)
    shape = AttentionShape(arch.num_attention_heads, arch.num_kv_heads, arch.head_dim)
    return library, AttentionPlanners("triton", shape, torch.device("cpu"), num_ranks, library)


def test_a_step_that_measured_memory_prepares_nothing(arch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library, planners = make_planners(arch, monkeypatch)
    prepared = []
    library.thread._make_ready = prepared.append
    metadata = AttentionMetadata(
        np.array([0, 2048], np.int32),
        np.array([16384], np.int32),
        torch.zeros((1, 1024), dtype=torch.int32),
        16,
    )
    for is_sizing in (True, False):
        planners.make().plan(metadata)
        if is_sizing:
            planners.after_sizing()
        planners.after_step()
        library.thread.wait()
        assert bool(prepared) != is_sizing


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_graphs_wait_for_preparing(arch: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """One rank puts its graphs off; several wait, so that they capture in the same step."""
    library, planners = make_planners(arch, monkeypatch, num_ranks)
    assert planners.may_capture()
    waited = []

    class Busy:
        is_idle = False

        def wait(self) -> None:
            waited.append(True)
            self.is_idle = True

    library.thread = Busy()
    assert planners.may_capture() == (num_ranks > 1) == bool(waited)


def test_a_graph_waits_for_one_plan_at_most(arch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps lie between those that ask; but if none asks again, preparing goes on."""
    library, planners = make_planners(arch, monkeypatch)
    begun = []

    class Endless:
        """There is always one more to prepare."""

        is_idle = True

        def prepare(self) -> bool:
            if self.is_idle:
                begun.append(True)
                self.is_idle = False
            return True

    thread = library.thread = Endless()
    planners.after_step()
    assert not planners.may_capture()
    planners.after_step()
    thread.is_idle = True
    planners.after_step()  # of a step of a long prompt, which captures nothing
    assert planners.may_capture() and len(begun) == 1
    planners.after_step()
    assert len(begun) == 2 and not planners.may_capture()
    thread.is_idle = True
    for _ in range(10):
        planners.after_step()
    assert len(begun) == 3


def test_a_cpu_takes_none(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    assert EngineConfig.from_options(attention_library="off").device.attention_library == "off"
    with pytest.raises(ConfigError, match="attention_library='cudnn' needs an NVIDIA GPU"):
        LLM(str(tmp_path), skip_tokenizer_init=True, attention_library="cudnn", device="cpu")


def answers(folder: Path) -> tuple[list[list[int]], Any]:
    """Greedy tokens of prompts of several chunks, one after another; the worker's library."""
    config = EngineConfig.from_options(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        num_kv_blocks=40,
        max_model_len=128,
        max_stall_ms=float("inf"),  # chunks have the same lengths however slow the machine is
        enable_prefix_caching=False,
        kernels="reference",
    )
    core = build_engine_core(config)
    planners = core.executor._worker._planners  # type: ignore[attr-defined]
    library = planners._library
    found = []
    for number in range(3):
        ids = [(7 * number + place) % 90 + 3 for place in range(53)]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        core.add_request(EngineCoreRequest(f"r{number}", ids, params, 3))
        tokens: list[int] = []
        while core.has_work():
            for item in core.step():
                tokens += item.new_token_ids
            if library is not None:
                library.thread.wait()
        found.append(tokens)
    core.shutdown()
    assert planners._library is None
    return found, library


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU only")
def test_an_engine_prepares_after_its_steps_and_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: the Triton kernels interpreted, the library plain torch, few tokens long chunks."""
    pytest.importorskip("triton")
    from headrace.attention import library as planning
    from headrace.kernels.reference import attention as reference
    from headrace.kernels.triton.attention import attention
    from headrace.kernels.triton.library_attention import AttentionLibrary

    make_model("llama", tmp_path)
    expected, library = answers(tmp_path)
    assert library is None
    rule = planning.LibraryRule(min_rows=16, min_pairs=0, max_padding=1.3, unit=8, max_piece=16)
    attend = PlainTorch()

    def small(setting: str, arch: Any, shape: AttentionShape, **options: Any) -> AttentionLibrary:
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, options["block_size"])
        rows = rule.max_rows(options["max_chunk"])
        return AttentionLibrary(
            *heads, torch.float32, torch.device("cpu"), max_rows=rows, max_piece=16, attend=attend
        )

    monkeypatch.setattr(worker, "make_attention_library", small)
    monkeypatch.setattr(planning, "LibraryRule", lambda: rule)
    monkeypatch.setattr(reference, "attention", attention)
    found, library = answers(tmp_path)
    assert found == expected
    wanted = {(24, 24, True), (24, 16, False), (24, 8, False)}
    assert set(attend.calls) == wanted, (
        "chunks of 24 after 0 and 24; 5 rows after 48 stay with the paged kernels"
    )
    num_layers, num_served = 3, 2  # the first prompt's chunks were computed before their plans were made
    assert attend.calls.count((24, 24, True)) == 1 + 2 * num_layers * num_served
    assert attend.calls.count((24, 16, False)) == 1 + num_layers * num_served


def test_the_largest_chunk_is_what_one_prompt_gets_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a step holds, else the usual lengths would be those of chunks that never come."""
    make_model("llama", tmp_path)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(worker, "make_attention_library", lambda *_, **options: asked.update(options))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_prefill_chunk": 16, "max_model_len": 128}
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 40, **limits}
    build_engine_core(EngineConfig.from_options(model=str(tmp_path), **options)).shutdown()
    assert (asked["max_chunk"], asked["max_context"]) == (16, 128)


@pytest.mark.gpu
def test_long_prompts_give_the_same_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounding, of which bf16 has much more by itself."""
    from headrace.attention import library as planning
    from headrace.kernels.triton.library_attention import AttentionLibrary

    rule = planning.LibraryRule(min_pairs=0, max_padding=1.5)
    monkeypatch.setattr(planning, "LibraryRule", lambda: rule)
    make_model("llama", tmp_path, head_dim=64, max_position_embeddings=16384)
    spans: list[Any] = []
    attend_span = AttentionLibrary.attend_span

    def counted(self: AttentionLibrary, span: Any, *arguments: Any) -> None:
        spans.append(span)
        attend_span(self, span, *arguments)

    monkeypatch.setattr(AttentionLibrary, "attend_span", counted)
    prompts = [{"prompt_token_ids": [(7 * i + 3 * seed) % 150 + 3 for i in range(7000)]} for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for setting, dtype in (("off", "float32"), ("off", "bfloat16"), ("cudnn", "bfloat16")):
        with LLM(
            str(tmp_path),
            dtype=dtype,
            skip_tokenizer_init=True,
            attention_library=setting,
            max_num_batched_tokens=3072,
            max_model_len=8192,
        ) as llm:
            library = llm._core.executor._worker._planners._library  # type: ignore[attr-defined]
            outputs = []
            for prompt in prompts:
                outputs += llm.generate([prompt], params, use_tqdm=False)
                if library is not None:  # plans are made beside the steps
                    library.thread.wait()
                    while library.thread.prepare():
                        library.thread.wait()
        assert bool(spans) == (setting == "cudnn")
        rows = [entry for output in outputs for entry in output.prompt_logprobs[1:]]
        found.append(torch.tensor([next(iter(entry.values())).logprob for entry in rows]))
    assert {bool(span.pieces) for span in spans} == {True, False}
    exact, own, library_s = found
    rounding = float((own - exact).abs().mean())  # what 16 bits cost, by any kernel
    assert float((library_s - exact).abs().mean()) < 1.1 * rounding
    assert float((library_s - own).abs().mean()) < 0.5 * rounding
