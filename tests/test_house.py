"""The house rules that no linter knows: sizes, torch-free rooms, documented settings."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "headrace"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
TORCH_FREE = ["core", "grammar", "checkpoint", "tokenizer", "serve", "cli", "engine", "observe"]
TORCH_FREE_FILES = [
    "__init__",
    "config",
    "config_checks",
    "errors",
    "names",
    "outputs",
    "sampling_params",
    "server_address",
    "structured_outputs",
]
HEAVY = ["torch", "transformers", "triton"]

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def torch_free_modules() -> list[str]:
    files = [path for room in TORCH_FREE for path in sorted((PACKAGE / room).rglob("*.py"))]
    files += [PACKAGE / f"{name}.py" for name in TORCH_FREE_FILES]
    return [module_name(path) for path in files]


def test_api_side_and_control_plane_never_import_torch() -> None:
    """Each module is imported in turn in one fresh interpreter; the first that brings torch is named."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split(','):\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    names = torch_free_modules()
    assert len(names) > 20
    done = subprocess.run([sys.executable, "-c", program, ",".join(names)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{path} is too long: one file, one idea"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {lines} lines"


def config_fields() -> list[tuple[str, dataclasses.Field[Any]]]:
    return [
        (section.name, option)
        for section in dataclasses.fields(EngineConfig)
        for option in dataclasses.fields(section.default_factory())  # type: ignore[misc]
    ]


@pytest.mark.parametrize(
    ("section", "option"), config_fields(), ids=lambda value: getattr(value, "name", value)
)
def test_every_setting_has_a_default_and_a_doc(section: str, option: dataclasses.Field[Any]) -> None:
    has_default = (
        option.default is not dataclasses.MISSING or option.default_factory is not dataclasses.MISSING
    )
    assert has_default, f"{section}.{option.name} has no default"
    doc = option.metadata.get("doc", "")
    assert len(doc) >= 10 and not doc.endswith("."), f"{section}.{option.name} needs a one-line doc"


def test_no_setting_is_read_from_the_environment() -> None:
    """Behaviour comes from the configuration; only paths and debugging may come from the environment."""
    allowed = {"HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN", "HF_HUB_OFFLINE"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = environment_name(node)
            assert name is None or name in allowed, f"{path}:{node.lineno} reads {name}"  # type: ignore[attr-defined]


def test_cuda_is_called_in_two_places_only() -> None:
    """A new device is one file in ``platforms``; whoever calls ``torch.cuda`` elsewhere would have to change, too."""
    homes = {PACKAGE / "platforms" / "cuda.py", PACKAGE / "runtime" / "cuda_graph.py"}
    for path in set(SOURCES) - homes:
        for node in ast.walk(ast.parse(path.read_text())):
            is_cuda = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
            assert not is_cuda, f"{path}:{node.lineno} calls torch.cuda"  # type: ignore[attr-defined]


def test_tensors_name_their_type_and_place() -> None:
    """A program that holds an engine may have set torch's default type or device, which are none of the engine's."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            maker, missing = unnamed(node)
            assert not missing, f"{path}:{node.lineno} {maker} without {missing}"  # type: ignore[attr-defined]


def unnamed(node: ast.AST) -> tuple[str, set[str]]:
    """The torch function that makes a tensor in this call (perhaps by way of ``partial``), and which of dtype and
    device it leaves to torch's defaults."""
    if not isinstance(node, ast.Call):
        return "", set()
    given = {word.arg for word in node.keywords}
    made = node.args[0] if ast.unparse(node.func) == "partial" and node.args else node.func
    holder, _, name = ast.unparse(made).rpartition(".")
    if holder != "torch" or given & {"out", None}:
        return "", set()
    if name in ("arange", "randint", "randperm"):  # integers of integers
        return name, {"device"} - given
    is_maker = name in ("empty", "zeros", "ones", "full", "tensor", "rand", "randn", "linspace", "eye")
    return name, {"dtype", "device"} - given if is_maker else set()


def environment_name(node: ast.AST) -> str | None:
    """The variable that ``os.environ[...]``, ``os.environ.get(...)`` or ``os.getenv(...)`` reads."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        holder, key = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        holder, key = node.func.value, node.args[0]
        if node.func.attr == "getenv":
            return ast.unparse(key).strip("'\"")
        if node.func.attr != "get":
            return None
    else:
        return None
    is_environ = isinstance(holder, ast.Attribute) and holder.attr == "environ"
    return ast.unparse(key).strip("'\"") if is_environ else None
