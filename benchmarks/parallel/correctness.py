"""Do several devices give the tokens of one? fp32, random weights (or a packaged model), graphs on and off.

    python benchmarks/parallel/correctness.py [--tensor 2] [--pipeline 2] [--device cuda] [--model smollm2]
    python benchmarks/parallel/correctness.py --alone llama-3-8b      # bf16, one request at a time: a launch a token

Answers of one device are the reference; a token may differ only where the two best log-probabilities are within 1e-3
(bf16: 0.1, some ulps of a logit).
Only the reference asks for log-probabilities, so that the others' steps pick tokens as they do under load: in graphs,
and from slices of the vocabulary (``pick_in_parts``). Seeded draws have no such margin: rounding changes few of them,
and a quarter of the answers may differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.outputs import RequestOutput

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.1}
MODELS = Path(__file__).parent.parent / "data" / "models"
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 128,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "tie_word_embeddings": True,
    },
}
COMMON = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def answers(
    model: str, prompts: list[list[int]], num_tokens: int, options: dict[str, Any], num_logprobs: int | None
) -> list[RequestOutput]:
    """Each prompt's greedy answer, with the best log-probabilities of each token, and then each one's drawn answer."""
    start = time.perf_counter()
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=num_logprobs)
    drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=num_tokens, ignore_eos=True)
    params = [greedy] * len(prompts) + [drawn] * len(prompts)
    options = {"dtype": "float32", "max_model_len": 1024, **options}
    alone = options.pop("alone", False)
    with LLM(model, **options) as llm:
        ready = time.perf_counter() - start
        requests = [({"prompt_token_ids": ids}, each) for ids, each in zip(prompts * 2, params, strict=True)]
        outputs = []
        for batch in [[request] for request in requests] if alone else [requests]:
            ids, chosen = zip(*batch, strict=True)
            outputs += llm.generate(list(ids), list(chosen), use_tqdm=False)
    print(f"    {options}: ready in {ready:.1f} s, all in {time.perf_counter() - start:.1f} s", flush=True)
    return outputs


def compare(
    reference: list[RequestOutput], found: list[RequestOutput], near_tie: float
) -> tuple[int, int, int]:
    """(tokens compared, near ties, mismatches); an answer counts up to its first difference."""
    num_tokens = num_ties = num_wrong = 0
    for expected, got in zip(reference, found, strict=True):
        entries = expected.outputs[0].logprobs
        assert entries is not None
        pairs = zip(expected.outputs[0].token_ids, got.outputs[0].token_ids, entries, strict=True)
        for one, other, entry in pairs:
            num_tokens += 1
            if one != other:
                best = sorted((value.logprob for value in entry.values()), reverse=True)
                is_tie = best[0] - best[1] < near_tie
                num_ties, num_wrong = num_ties + is_tie, num_wrong + (not is_tie)
                break
    return num_tokens, num_ties, num_wrong


def check(name: str, model: str, base: dict[str, Any], cases: list[dict[str, Any]], vocab: int) -> bool:
    """Run every case against one device."""
    rng = random.Random(0)
    lengths = [1, 5, 17, 64, 130, 300, 511, 700]
    prompts = [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]
    print(name, flush=True)
    reference = answers(model, prompts, 48, base, 2)
    count = len(prompts)
    near_tie = NEAR_TIE[base.get("dtype", "float32")]
    is_good = True
    for case in cases:
        found = answers(model, prompts, 48, {**base, **case}, None)
        total, ties, wrong = compare(reference[:count], found[:count], near_tie)
        others = sum(
            one.outputs[0].token_ids != other.outputs[0].token_ids
            for one, other in zip(reference[count:], found[count:], strict=True)
        )
        is_case_good = wrong == 0 and (near_tie > 1e-3 or 4 * others <= count)
        is_good &= is_case_good
        print(
            f"{'ok  ' if is_case_good else 'BAD '} {name} {case}: {total} tokens, {ties} near ties, {wrong} wrong; "
            f"{others} of {count} drawn answers differ"
        )
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="a packaged model, at the pipeline size only")
    parser.add_argument("--alone", metavar="SHAPE", help="bf16, each request alone, at the tensor size only")
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--cases", help="i:j, a slice of the cases")
    args = parser.parse_args()
    base: dict[str, Any] = {"device": args.device, "kv_cache_bytes": 1 << 30}
    pipeline = [{"pipeline_parallel_size": args.pipeline}] if args.pipeline > 1 else []
    if args.model:
        return 0 if check(args.model, args.model, base, pipeline, 40000) else 1
    tensor = {"tensor_parallel_size": args.tensor}
    in_parts = {**tensor, "pick_in_parts": True}
    cases = [tensor, in_parts, *pipeline]
    if args.device == "cuda":
        cases += [{**case, "max_graph_tokens": 0} for case in (tensor, in_parts)]
        cases += [{**tensor, "all_reduce": "library"}]
        cases += [{**case, "max_graph_tokens": 0} for case in pipeline]
    base |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if args.alone:
        base |= {"dtype": "bfloat16", "alone": True}
        graphless = {**tensor, "max_graph_tokens": 0}
        vocab = json.loads((MODELS / args.alone / "config.json").read_text())["vocab_size"]
        return 0 if check(args.alone, str(MODELS / args.alone), base, [tensor, graphless], vocab) else 1
    if args.cases:
        first, last = (
            int(text or default) for text, default in zip(args.cases.split(":"), (0, len(cases)), strict=True)
        )
        cases = cases[first:last]
    is_good = True
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(COMMON | SHAPES[name]))
            is_good &= check(name, str(path), base, cases, COMMON["vocab_size"])  # type: ignore[arg-type]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
