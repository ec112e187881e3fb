"""What may take the place of a running model's weights: the same model, with other numbers in its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace

import torch

from headrace.checkpoint import ModelArchitecture, load_architecture, resolve_model
from headrace.checkpoint.source import is_hub_id
from headrace.errors import CheckpointError, ConfigError, EngineDeadError, HeadraceError
from headrace.runtime.model_loader import ModelFiles, StoredForms

ROOM_FOR_NEW = 1.5
"""Free memory, as a multiple of the weights in the compute type, from which on two models are held for a moment."""

_FREE = ("torch_dtype", "bos_token_id", "eos_token_ids", "pad_token_id")
"""Fields that may differ: how numbers are stored, and what the engine's other end has from the model it began with."""


def replacement_of(running: ModelFiles, model: str | None) -> ModelFiles:
    """The files of ``model``, a folder or file; of None those loaded last, as they are now. Dummy weights give way to
    real ones.

    Raises:
        CheckpointError: there is no such model, or its description cannot be read.
        ConfigError: it describes another model than the one that runs.
    """
    config, source = running.config, running.source
    if model is not None:
        if is_hub_id(model):
            raise ConfigError(
                f"model is {model!r}, and the engine's machine has no such folder or file; download it first and give "
                "its folder"
            )
        source = resolve_model(model)
        config = replace(config, model=model, revision=None)
    if config.load_format == "dummy":
        config = replace(config, load_format="auto")
    if source.kind != running.source.kind:
        raise _differs(source.path, "the kind of its files", running.source.kind, source.kind)
    files = ModelFiles(config, source, load_architecture(source))
    _check_same_model(running.arch, files)
    return files


def check_same_type(files: ModelFiles, running: torch.dtype, found: torch.dtype) -> None:
    """Refuse weights that an engine would compute in another type. Raises ConfigError."""
    if found != running:
        raise ConfigError(
            f"{files.source.path} would be computed in {found}, and the engine computes in {running}; store it in that "
            "type, or start the engine with dtype"
        )


def check_same_forms(files: ModelFiles, running: StoredForms, found: StoredForms) -> None:
    """Refuse tensors in other ggml blocks than those that run, which take other kernels and other memory.

    Raises: ConfigError.
    """
    for name, form in running.items():
        if name in found and found[name] != form:
            raise _differs(files.source.path, f"the type of {name}", _name(form), _name(found[name]))


@contextlib.contextmanager
def replacing(where: object, *, is_intact: bool) -> Iterator[None]:
    """What fails inside says what has become of the engine.

    Args:
        where: the new weights' folder or file.
        is_intact: the old weights are there and go on after a failure.

    Raises: CheckpointError, ConfigError, DeviceMemoryError while they are; EngineDeadError when they are gone.
    """
    try:
        yield
    except Exception as error:
        what = f"the weights of {where!s:.200} could not be loaded ({type(error).__name__}: {error!s:.500})"
        if not is_intact:
            raise EngineDeadError(
                f"{what}, and the old ones are gone, since the device had no room for both: start the engine again"
            ) from error
        if isinstance(error, HeadraceError):
            raise
        raise CheckpointError(f"{what}; the old ones go on") from error


def _check_same_model(running: ModelArchitecture, files: ModelFiles) -> None:
    for each in fields(ModelArchitecture):
        expected, found = getattr(running, each.name), getattr(files.arch, each.name)
        if each.compare and each.name not in _FREE and expected != found:
            raise _differs(files.source.path, each.name, expected, found)


def _differs(path: object, what: str, expected: object, found: object) -> ConfigError:
    return ConfigError(
        f"{path} is another model than the one that runs: {what} is {found!s:.200}, and must be {expected!s:.200}; "
        "give weights of the same model, or start another engine"
    )


def _name(form: object) -> str:
    return "dense" if form is None else str(getattr(form, "name", form))
