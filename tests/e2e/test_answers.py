"""Answers of tiny models through the Python API, where scheduling once showed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from tests.e2e.tiny_models import make_model


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_num_seqs": 4, "num_kv_blocks": 7}])
def test_prompt_logprobs_come_once_whatever_is_recomputed(tmp_path: Path, options: dict[str, int]) -> None:
    make_model("llama", tmp_path)
    prompts = [[5, 6, 7, 8 + number] for number in range(3)]
    params = SamplingParams(n=3, temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=1)
    with LLM(
        str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=64, block_size=16, **options
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        for token, entry in zip(prompt[1:], entries[1:], strict=True):
            assert entry is not None and token in entry


def test_a_head_of_its_own_counts_although_the_config_ties_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(tensors["lm_head.weight"])
        expected = int(model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == [expected]
