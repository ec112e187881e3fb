"""resolve_model: from the one model argument to files on disk."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.checkpoint.packaged import PACKAGED_MODELS, packaged_file
from headrace.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies.

    Attributes:
        kind: ``hf``, a folder with config.json; ``gguf``, one file.
        path: that folder or file.
        name: a short name to serve it under.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    name: str


def resolve_model(
    model: str, *, revision: str | None = None, download_dir: str | Path | None = None
) -> ModelSource:
    """Finds the model that ``model`` names: a packaged model, a .gguf file, a folder, or a hub id ``org/name``.

    A packaged model's name wins over a folder of that name (write ``./smollm2`` for the folder); an existing folder
    wins over a hub id. ``revision`` and ``download_dir`` matter for hub ids only.

    Raises:
        CheckpointError: nothing is found; the message says what was looked for and how to give a model.
    """
    name = str(model).strip()
    if not name or "\0" in name:
        raise CheckpointError(f"the model argument {model!r} is empty or has a NUL; {_how_to()}")
    if name in PACKAGED_MODELS:
        return ModelSource("gguf", packaged_file(name), name)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _from_folder(path, path.resolve().name)
        if path.exists():
            return _from_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if is_hub_id(name):
        return _from_folder(_download(name, revision, download_dir), name)
    near = difflib.get_close_matches(name.lower(), PACKAGED_MODELS, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}? Else " if near else ""
    raise CheckpointError(
        f"model '{name}': there is no such file or folder, nor a packaged model; {hint}{_how_to()}"
    )


def is_hub_id(model: str) -> bool:
    """True when ``resolve_model`` would ask the hub, which may take long."""
    name = model.strip()
    looks_so = _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")
    return looks_so and name not in PACKAGED_MODELS and not Path(name).exists()


def _how_to() -> str:
    return (
        "give a folder with config.json, a .gguf file, a hub id 'org/name', or a packaged model "
        f"({', '.join(PACKAGED_MODELS)})"
    )


def _from_file(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path}: is not a .gguf file; for a Hugging Face model give its folder")
    return ModelSource("gguf", path, path.stem)


def _from_folder(path: Path, name: str) -> ModelSource:
    gguf_files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    has_weights = any(file.suffix == ".safetensors" for file in path.iterdir())
    if (path / "config.json").is_file() and (has_weights or not gguf_files):
        return ModelSource("hf", path, name)
    if len(gguf_files) == 1:
        return ModelSource("gguf", gguf_files[0], name)
    if gguf_files:
        raise CheckpointError(
            f"{path}: has {len(gguf_files)} .gguf files ({', '.join(file.name for file in gguf_files[:8])}); "
            "give the path of one"
        )
    raise CheckpointError(f"{path}: has neither config.json nor a .gguf file; {_how_to()}")


def _download(name: str, revision: str | None, download_dir: str | Path | None) -> Path:
    """Fetches the files of a hub id, or finds them in the hub's cache when there is no network."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=str(download_dir) if download_dir is not None else None,
            allow_patterns=list(_HUB_PATTERNS),
        )
    # The hub client raises errors of its own, of its HTTP library and of the system; all mean the same here.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"model '{name}': not a packaged model ({', '.join(PACKAGED_MODELS)}), no such folder here, and the "
            f"Hugging Face hub (revision {revision or 'main'}) did not give it: {reason}; "
            "download it first and give its folder, or check the name and the network"
        ) from error
    return Path(folder)
