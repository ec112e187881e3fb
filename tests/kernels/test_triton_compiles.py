"""Every kernel compiles for Hopper, with no GPU here; what the interpreter cannot run is compiled at least."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PARTS = ["decode 1x1k", "decode 512x300", "prefill 4x500", "qkv T=1", "qwen3-0.6b", "sampling R=1", "step"]


@pytest.mark.slow
def test_kernels_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "benchmarks/kernels/bench_triton.py",
        "--compile-only",
        "0/1",
        "--only",
        *PARTS,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "count"), [("compile_quantized.py", 3 * 4), ("compile_library.py", 3)])
def test_programs_that_compile(program: str, count: int) -> None:
    check_program(program, count)


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ("compile_stack.py", 7),
        ("compile_packed.py", 5),
        ("compile_few_rows.py", 4),
        ("compile_attention.py", 4),
    ],
)
def test_gluon_compiles(program: str, count: int) -> None:
    """It changes from one version of Triton to the next, and no other test without a GPU compiles these kernels."""
    check_program(program, count)


def check_program(program: str, count: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks/kernels")])
    command = [sys.executable, f"tests/kernels/{program}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") == count
