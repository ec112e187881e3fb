"""The one exception tree.

HeadraceError
├── ConfigError                a setting is wrong or two settings do not go together
├── CheckpointError            a model file is missing, cut, corrupt or does not fit
│   └── UnsupportedModelError  an architecture, tokenizer or tensor type that Headrace does not know
├── RequestError               one request is wrong: a parameter, a prompt, its length
├── CapacityError              no room now: waiting queue full, or a request that can never fit
├── GrammarError               a constraint that cannot be compiled or satisfied
├── DeviceMemoryError          the device has no memory left; carries the ledger and the setting that helps
└── EngineDeadError            the engine stopped; carries the cause

User mistakes raise one of these with the value, the limit and the fix in the sentence; ``assert`` is kept for
our own invariants.
"""

from __future__ import annotations

from typing import Any


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A setting has a value that cannot work; the message names it, the limit and the fix."""


class CheckpointError(HeadraceError):
    """A model's files cannot be read; the message names the file and the tensor or key."""


class UnsupportedModelError(CheckpointError):
    """The files are sound but describe something unknown; the message lists what is known."""


class RequestError(HeadraceError, ValueError):
    """One request is wrong. It alone ends; others go on.

    Args:
        message: a sentence with the value, the limit and the fix.
        param: the request field at fault, as the user spells it ("temperature"), or None.
        code: a short machine-readable word ("context_length_exceeded"), or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_request_error, (type(self), self.message, self.param, self.code)


class CapacityError(RequestError):
    """There is no room for a request: the waiting queue is full, or the KV cache can never hold it."""


class GrammarError(RequestError):
    """A constraint cannot be compiled or satisfied; the message names its path."""


class DeviceMemoryError(HeadraceError):
    """The device has no memory left; the message holds the ledger and the one setting that fixes it."""


class EngineDeadError(HeadraceError):
    """The engine has stopped; ``__cause__`` or the message holds why."""


def error_class(name: str) -> type[HeadraceError] | None:
    """The class below ``HeadraceError`` of that name, as it came over a wire; None: there is none."""
    found = globals().get(name)
    is_ours = isinstance(found, type) and issubclass(found, HeadraceError) and found is not HeadraceError
    return found if is_ours else None


def _rebuild_request_error(
    cls: type[RequestError], message: str, param: str | None, code: str | None
) -> RequestError:
    return cls(message, param=param, code=code)
