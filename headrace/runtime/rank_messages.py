"""What crosses between an executor and its ranks. One msgspec union each way."""

from __future__ import annotations

import socket
import struct
import threading

import msgspec

from headrace.config import EngineConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import ModelRunnerOutput, SchedulerOutput

LENGTH = struct.Struct("<I")


class RankSpec(msgspec.Struct, tag="spec"):
    """The first message: who the ranks are together.

    rendezvous: where they meet ("file:///…", "tcp://host:port").
    num_local_ranks: ranks that share this host; 0 where each learns its place from its launcher.
    """

    config: EngineConfig
    rendezvous: str
    num_local_ranks: int


class RunStep(msgspec.Struct, tag="run"):
    """Run a step's forward."""

    scheduler_output: SchedulerOutput


class Sample(msgspec.Struct, tag="sample"):
    """Sample for the step last run. ``mask``: uint32 words of the token masks of ``rows``; None without."""

    mask: bytes | None = None
    rows: list[int] = []


class CheckWeights(msgspec.Struct, tag="check_weights"):
    """See whether the weights of a folder or file can replace those that run (None: the same files again)."""

    model: str | None


class UpdateWeights(msgspec.Struct, tag="update_weights"):
    """Replace them; all ranks have found that it can be done."""

    model: str | None


class Stop(msgspec.Struct, tag="stop"):
    """End now."""


class RankReady(msgspec.Struct, tag="ready"):
    """A rank takes steps from now on.

    num_kv_blocks: the same on all ranks.
    weight_bytes_read: stored bytes that it read.
    memory_bytes: what it holds on its device.
    startup_s: seconds of each stage of its start.
    """

    specs: list[KVCacheSpec]
    num_kv_blocks: int
    weight_bytes_read: int
    kv_cache_bytes: int
    memory_bytes: int
    device: str
    startup_s: dict[str, float] = {}


class RankWeights(msgspec.Struct, tag="weights"):
    """The answer to ``CheckWeights`` and ``UpdateWeights``: done, or the error (its class's name, and text) for which
    nothing was changed."""

    kind: str = ""
    message: str = ""


class RankProgress(msgspec.Struct, tag="progress"):
    """How far a rank's loading has come."""

    stage: str
    share: float


class RankOutput(msgspec.Struct, tag="output"):
    """A step's results, from the rank that reports them."""

    output: ModelRunnerOutput


class RankBeat(msgspec.Struct, tag="beat"):
    """The ``RankStatus`` of a rank on another host, every second."""

    status: list[int]


class RankFailed(msgspec.Struct, tag="failed"):
    """A rank's last words. ``kind`` is the error class's name."""

    kind: str
    message: str
    trace: str = ""


ToRank = RankSpec | RunStep | Sample | CheckWeights | UpdateWeights | Stop
FromRank = RankReady | RankWeights | RankProgress | RankOutput | RankBeat | RankFailed


class RankVoice:
    """Sends a rank's messages; any thread may."""

    def __init__(self, rank_socket: socket.socket) -> None:
        self._socket = rank_socket
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def send(self, message: FromRank) -> None:
        """Raises OSError when nobody listens any more."""
        data = self._encoder.encode(message)
        with self._lock:
            self._socket.sendall(LENGTH.pack(len(data)) + data)


class RankEar:
    """Puts a rank's messages together from what its socket brings."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

    def hear(self, data: bytes) -> list[FromRank]:
        """The messages that ``data`` completes."""
        self._buffer += data
        messages: list[FromRank] = []
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            end = LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
        return messages
