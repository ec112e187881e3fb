"""Tiny random models made with transformers, and its greedy answers with the margins of each choice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

NEAR_TIE = 1e-4
VOCAB = 160

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 3}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_hidden_layers": 2, "sliding_window": 20}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 2
            + ["full_attention"]
            + ["sliding_attention"] * 2
            + ["full_attention"],
        },
    ),
}

MORE_MAKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
}
"""Architectures that schedule, cache and share like one of ``MAKERS``; their own parts are the models' tests'."""


def make_model(name: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a tiny random model of that architecture in ``folder``; returns the transformers model (fp32, eval).

    changes: to its config.
    """
    family, options = (MAKERS | MORE_MAKERS)[name]
    kind = f"{family}Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **options, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    model.save_pretrained(folder)
    return model


@dataclass
class Reference:
    """What transformers answers greedily, and whether each choice was a near tie."""

    token_ids: list[int]
    is_near_tie: list[bool]


@torch.no_grad()
def greedy_reference(model: Any, prompt: list[int], num_tokens: int) -> Reference:
    """Greedy tokens by full recomputation without a cache (eager attention order does not matter at fp32)."""
    ids, ties = list(prompt), []
    past = None
    inputs = torch.tensor([ids])
    for _ in range(num_tokens):
        out = model(inputs, past_key_values=past, use_cache=True)
        past = out.past_key_values
        best = torch.topk(out.logits[0, -1].double(), 2).values
        ties.append(bool((best[0] - best[1]) <= NEAR_TIE * best[0].abs()))
        ids.append(int(out.logits[0, -1].argmax()))
        inputs = torch.tensor([ids[-1:]])
    return Reference(ids[len(prompt) :], ties)


class Comparison:
    """Counts tokens that agree; the first mismatch of an answer counts unless it was a near tie."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_excused = 0
        self.failures: list[str] = []

    def add(self, label: str, reference: Reference, token_ids: list[int]) -> None:
        """Compare one answer."""
        for index, (expected, found) in enumerate(zip(reference.token_ids, token_ids, strict=True)):
            self.num_tokens += 1
            if expected == found:
                continue
            if reference.is_near_tie[index]:
                self.num_excused += 1
            else:
                self.failures.append(f"{label}: token {index} is {found}, transformers says {expected}")
            return

    def check(self) -> None:
        """Assert that nothing differs but near ties, and those under 1 %."""
        assert not self.failures, self.failures[:5]
        assert self.num_excused <= 0.01 * max(self.num_tokens, 100), f"{self.num_excused} near ties"
