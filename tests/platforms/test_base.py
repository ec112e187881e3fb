from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import headrace
from headrace.errors import ConfigError
from headrace.platforms.base import Platform, current_platform

PACKAGE = Path(headrace.__file__).parent
MAY_TOUCH_CUDA = {Path("platforms/cuda.py"), Path("runtime/cuda_graph.py")}


def test_cpu_is_always_there() -> None:
    platform: Platform = current_platform("cpu")
    assert platform.name == "cpu" and platform.device == torch.device("cpu")


def test_auto_takes_what_is_there() -> None:
    assert current_platform().name == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"device='cuda' .*no NVIDIA GPU is visible; use device='cpu'"):
        current_platform("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="was built without CUDA"):
        current_platform("cuda")


def test_a_gpu_too_many_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"GPU number 2 .*this host has 2 \(numbers 0 to 1\)"):
        current_platform("cuda", local_rank=2)


def touches_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch"
    return isinstance(node, ast.Import) and any(alias.name.startswith("torch.cuda") for alias in node.names)


def test_nobody_else_calls_torch_cuda() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE) not in MAY_TOUCH_CUDA:
            for node in ast.walk(ast.parse(path.read_text())):
                assert not touches_cuda(node), f"{path}:{node.lineno} belongs into platforms/cuda.py"  # type: ignore[attr-defined]
