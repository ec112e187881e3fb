"""Native code and torch share one set of threads: none is added, and no more run at once than were asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kernels.native.library import NativeLibrary, load_library
from tests.e2e.tiny_models import make_model

ROOT = Path(__file__).parent.parent.parent
if not isinstance(load_library(), NativeLibrary) or not Path("/proc/self/task").exists():
    pytest.skip("needs native kernels and Linux", allow_module_level=True)

ONE_POOL = """
import os, torch
from headrace.kernels.native.linear import linear, pack_weight
torch.set_num_threads(3)
x, weight = torch.randn(64, 512), torch.randn(512, 512)
torch.mm(x, weight)
before = len(os.listdir("/proc/self/task"))
packed, out = pack_weight(weight), torch.empty(64, 512)
for _ in range(10):
    linear(x, packed, None, out)
    torch.mm(x, weight)
print(len(os.listdir("/proc/self/task")) - before)
"""

RUNNABLE = """
import os, sys, threading, time
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, kernels="native", threads=2, dtype="float32", num_kv_blocks=64)
prompts = [{"prompt_token_ids": list(range(3, 60))} for _ in range(4)]
params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
llm.generate(prompts, params, use_tqdm=False)
done, samples = threading.Event(), []
def watch():
    own = threading.get_native_id()
    while not done.is_set():
        running = 0
        for task in os.listdir("/proc/self/task"):
            try:
                state = open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()[0]
            except OSError:
                continue
            running += state == "R" and int(task) != own
        samples.append(running)
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
for _ in range(5):
    llm.generate(prompts, params, use_tqdm=False)
done.set()
watcher.join()
print(max(samples), len(samples))
"""


def run(program: str, *arguments: str) -> list[int]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_native_code_adds_no_threads_to_torchs() -> None:
    assert run(ONE_POOL) == [0]


def test_no_more_threads_run_than_were_asked_for(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    most, num_samples = run(RUNNABLE, str(tmp_path))
    assert num_samples > 10
    # The step's two threads, and for a moment the one that hands over a step's results.
    assert most <= 3
