"""A naive sampler for one request in float64 numpy, written from the meaning of each parameter."""

from __future__ import annotations

import numpy as np

from headrace.core.output import NewRequest


def processed_logits(
    logits: np.ndarray, new: NewRequest, tokens: list[int], mask: np.ndarray | None = None
) -> np.ndarray:
    """Logits after masks, bias and penalties; ``tokens`` are all tokens so far, prompt first."""
    params, result = new.sampling_params, logits.astype(np.float64).copy()
    prompt, output = tokens[: new.num_prompt_tokens], tokens[new.num_prompt_tokens :]
    for token in range(len(result)):
        if mask is not None and not (mask[token // 32] >> np.uint32(token % 32)) & np.uint32(1):
            result[token] = -np.inf
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            result[token] = -np.inf
        if len(output) < params.min_tokens and token in (params.stop_token_ids or []) + new.eos_token_ids:
            result[token] = -np.inf
        for word in params.bad_word_ids or []:
            start = len(output) - len(word) + 1
            if word[-1] == token and start >= 0 and word[:-1] == output[start:]:
                result[token] = -np.inf
        result[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt + output:
            better = result[token] > 0
            result[token] *= 1 / params.repetition_penalty if better else params.repetition_penalty
        count = output.count(token)
        result[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return result


def kept_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Probabilities after vLLM's filters (min_p, then top_k, then top_p), ties kept; 0 where removed."""
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    weights[weights < np.float32(min_p)] = 0.0
    order = np.argsort(-weights, kind="stable")
    if 0 < top_k < len(weights):
        weights[weights < weights[order[top_k - 1]]] = 0.0
    probabilities = weights / weights.sum()
    if top_p < 1.0:
        mass = np.cumsum(probabilities[order])
        last = order[min(int(np.searchsorted(mass, np.float32(top_p))), len(order) - 1)]
        probabilities[probabilities < probabilities[last]] = 0.0
    return probabilities / probabilities.sum()


def noise_key(sample_seed: int, child_index: int, position: int) -> int:
    """The key of one token, a signed 64-bit integer: splitmix64's finalizer chained over the arguments and a zero."""
    bits = (1 << 64) - 1
    x = sample_seed & bits
    for part in (child_index, position, 0):
        x = (x + (part + 1) * 0x9E3779B97F4A7C15) & bits
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & bits
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & bits
        x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def exponentials(key: int, num_tokens: int) -> np.ndarray:
    """The noise of every token, float64: -log(1 - u), u from Wellons' 32-bit mixer over key and token."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)
    x = np.arange(num_tokens, dtype=np.uint32) * np.uint32(0x9E3779B9) + low
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) ^ high
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    return -np.log1p(-np.minimum(((x >> np.uint32(1)) + 0.5) * 2.0**-31, 1 - 2.0**-24))


def draw(kept: np.ndarray, key: int) -> tuple[int, bool]:
    """(the token whose exponential clock rings first, whether rounding could not have changed it)."""
    scores = kept / exponentials(key, len(kept))
    best = np.sort(scores)[-2:]
    return int(np.argmax(scores)), bool(best[0] < best[-1] * (1 - 1e-5) or len(kept) == 1)


def sample(
    logits: np.ndarray, new: NewRequest, tokens: list[int], mask: np.ndarray | None = None
) -> tuple[int, bool]:
    """(token, whether rounding could not have changed it)."""
    params = new.sampling_params
    final = processed_logits(logits, new, tokens, mask)
    if params.temperature < 1e-5:
        best = np.sort(final)[-2:]
        return int(np.argmax(final)), bool(best[1] - best[0] > 1e-5 or best[1] == best[0])
    kept = kept_probabilities(final, params.temperature, params.top_k, params.top_p, params.min_p)
    return draw(kept, noise_key(new.sample_seed, new.child_index, len(tokens)))
