"""What crosses between an engine client and its engine core. Torch-free, one msgspec union each way."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.config import EngineConfig
from headrace.core.output import EngineCoreOutput, EngineCoreRequest


class CoreSpec(msgspec.Struct):
    """Which engine core to build: the first message a core process gets.

    factory: "module:function"; called as ``function(config, progress=..., **options)`` it returns the engine core.
    """

    factory: str
    config: EngineConfig
    options: dict[str, Any] = {}


class AddRequest(msgspec.Struct, tag="add"):
    """Take this request."""

    request: EngineCoreRequest


class AbortRequests(msgspec.Struct, tag="abort"):
    """Stop these requests and free what they hold; unknown ids are ignored."""

    request_ids: list[str]


class AbortChild(msgspec.Struct, tag="abort_child"):
    """End one answer of a request: its text met a stop string."""

    request_id: str
    child_index: int


class CacheCall(msgspec.Struct, tag="cache"):
    """Ask something of the prefix cache; a ``CallReply`` of the same ``call_id`` comes back."""

    call_id: int
    action: str
    arguments: dict[str, Any] = {}


class UpdateWeights(msgspec.Struct, tag="update_weights"):
    """Replace the model's weights (None: read the same files again); a ``CallReply`` of the same ``call_id`` comes
    back."""

    call_id: int
    model: str | None = None


class CallReply(msgspec.Struct, tag="call_reply"):
    """The answer to a call: plain values, or why it was refused. ``kind`` is the name of the error class in
    ``headrace.errors``."""

    call_id: int
    result: dict[str, Any] = {}
    kind: str | None = None
    message: str = ""
    param: str | None = None
    code: str | None = None


class StopCore(msgspec.Struct, tag="stop"):
    """End the engine core now; whatever still runs is dropped."""


class LoadProgress(msgspec.Struct, tag="progress"):
    """How far loading has come: ``stage`` is done to ``share`` in [0, 1]."""

    stage: str
    share: float = 0.0


class CoreReady(msgspec.Struct, tag="ready"):
    """The core takes steps from now on; ``stats`` is its state, ``load_s`` how long loading took."""

    load_s: float
    stats: dict[str, Any]


class StepNews(msgspec.Struct, tag="step"):
    """What one step or several produced, in one message.

    stats: the core's state after it; None: it was told lately.
    step_tokens: how many tokens each of the steps since the last message gave, of those that gave some.
    """

    outputs: list[EngineCoreOutput]
    stats: dict[str, Any] | None = None
    step_tokens: list[int] = []


class Refusal(msgspec.Struct, tag="refused"):
    """The core did not take a request. ``kind`` is the name of the error class in ``headrace.errors``."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class CoreFailed(msgspec.Struct, tag="failed"):
    """The core's last words. ``kind`` is the error class's name."""

    kind: str
    message: str


ToCore = AddRequest | AbortRequests | AbortChild | CacheCall | UpdateWeights | StopCore
FromCore = LoadProgress | CoreReady | StepNews | Refusal | CallReply | CoreFailed
