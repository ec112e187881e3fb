"""Ranks that somebody else starts: the same program everywhere, rank 0 answers, the others serve it and end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from tests.e2e.tiny_models import make_model

pytestmark = pytest.mark.slow
PROGRAM = """
import os, sys, time
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", device="cpu", threads=1, skip_tokenizer_init=True, max_model_len=64,
          num_kv_blocks=40, tensor_parallel_size=int(sys.argv[2]), pipeline_parallel_size=int(sys.argv[3]),
          launcher="external")
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[4]), ignore_eos=True)
while True:
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    print(os.environ["RANK"], outputs[0].outputs[0].token_ids, flush=True)
    if sys.argv[5:] != ["forever"]:
        break
llm.shutdown()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    (path / "program.py").write_text(PROGRAM)
    return path


def expected(folder: Path) -> list[int]:
    with LLM(str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, num_ranks: int, arguments: list[str]) -> list[subprocess.Popen[str]]:
    """The processes, as Slurm or Kubernetes would start them: with variables and nothing else."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return [
        subprocess.Popen(
            [sys.executable, folder / "program.py", folder, *arguments],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3)])
def test_only_rank_0_answers_and_all_end_well(folder: Path, tensor: int, pipeline: int) -> None:
    processes = start(folder, tensor * pipeline, [str(tensor), str(pipeline), "12"])
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert [out for out, _ in outputs] == [f"0 {expected(folder)}\n"] + [""] * (len(processes) - 1)


def test_under_torchrun(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         folder / "program.py", folder, "2", "1", "12"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 {expected(folder)}\n"


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_all_end(folder: Path, victim: int) -> None:
    processes = start(folder, 2, ["2", "1", "40", "forever"])
    assert processes[0].stdout is not None
    processes[0].stdout.readline()
    start_s = time.monotonic()
    processes[victim].send_signal(signal.SIGKILL)
    errors = [process.communicate(timeout=10)[1] for process in processes]
    assert time.monotonic() - start_s < 10
    if victim == 1:
        assert "rank 1 closed its connection" in errors[0] and processes[0].returncode == 1
