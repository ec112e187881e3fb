"""Workload files for ``headrace bench``: named lists of token-id prompts with the length of each answer."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint import load_architecture, resolve_model
from headrace.checkpoint.source import is_hub_id
from headrace.config import EngineConfig
from headrace.errors import CheckpointError, ConfigError

_SHAPE = '{"name": [{"prompt_ids": [1, 2, 3], "output_len": 16}, …], …}'


@dataclass(frozen=True)
class WorkloadRequest:
    """One prompt, and how many tokens are generated after it."""

    prompt_ids: list[int]
    output_len: int


def find_workloads(
    given: str, only: list[str] | None, config: EngineConfig, *, is_remote: bool = False
) -> dict[str, list[WorkloadRequest]]:
    """The workloads of a file, or those built in whose names ``given`` lists with commas, for the model's vocabulary.

    is_remote: the model is a server's, and its name may be one that only the server knows; ids are then as they are.

    Raises: ConfigError for a name that is neither, and as ``read_workloads`` does.
    """
    from headrace.cli.builtin_workloads import BUILT_IN, make_workload

    names = given.split(",")
    if not set(names) <= set(BUILT_IN):
        if len(names) == 1 and not Path(given).suffix:
            near = difflib.get_close_matches(given, BUILT_IN, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{given!r} is no file and no workload built in ({', '.join(BUILT_IN)}){hint}")
        return read_workloads(Path(given), only)
    if only:
        raise ConfigError(f"--only {only[0]} picks from a file; of those built in name the wanted: {only[0]}")
    try:
        # A hub's model is not downloaded for a server's sake.
        sizes = [] if is_remote and is_hub_id(config.model.model) else [_vocab_size(config)]
    except CheckpointError:
        if not is_remote:
            raise
        sizes = []
    return {name: make_workload(name, *sizes) for name in names}


def _vocab_size(config: EngineConfig) -> int:
    return load_architecture(resolve_model(config.model.model, revision=config.model.revision)).vocab_size


def read_workloads(path: Path, only: list[str] | None = None) -> dict[str, list[WorkloadRequest]]:
    """The file's workloads, or those named in ``only``, in the file's order. Entries that are no list are notes.

    Raises: ConfigError for a file that cannot be read, has another shape, or lacks a name of ``only``.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read workload file {str(path)!r}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"workload file {str(path)!r} must look like {_SHAPE}")
    lists = {name: rows for name, rows in content.items() if isinstance(rows, list)}
    for name in only or []:
        if name not in lists:
            raise ConfigError(f"workload file {str(path)!r} has no {name!r}; it has: {', '.join(lists)}")
    if not lists:
        raise ConfigError(
            f"workload file {str(path)!r} holds no list of requests; it must look like {_SHAPE}"
        )
    return {
        name: [_request(row, f"{name}[{index}]") for index, row in enumerate(rows)]
        for name, rows in lists.items()
        if not only or name in only
    }


def _request(row: Any, where: str) -> WorkloadRequest:
    if isinstance(row, dict):
        ids, length = row.get("prompt_ids"), row.get("output_len")
        if isinstance(ids, list) and type(length) is int and length >= 1 and all(type(i) is int for i in ids):
            return WorkloadRequest(ids, length)
    raise ConfigError(f"workload entry {where} must have integer prompt_ids and output_len >= 1")
