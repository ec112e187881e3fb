"""The engine core's own process: ``python -m headrace.engine.core_proc <socket folder> <log level>``.

It talks over two ZeroMQ pipes in a folder that only its user can enter, and ends when told to, when the core fails,
or when its standard input closes, which is how it learns that its parent is gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time

import msgspec
import zmq

from headrace.engine.core_loop import IDLE_LOOK_S, CoreLoop
from headrace.engine.messages import CoreSpec, FromCore, ToCore

TO_CORE = "to_core"
FROM_CORE = "from_core"
_LINGER_MS = 2000


class ZmqInbox:
    """Messages from a PULL socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)

    def get(self, block: bool) -> ToCore | None:
        """The next message, or None when none waits; with ``block``, when none comes for a while."""
        try:
            if block and not self._socket.poll(IDLE_LOOK_S * 1000):
                return None
            return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None


def endpoint(folder: str, name: str) -> str:
    """The address of one pipe."""
    return f"ipc://{folder}/{name}"


def main(folder: str) -> int:
    """Serve one engine core over the pipes in ``folder``. Returns the exit status."""
    # The parent decides when this process ends; a Ctrl-C or a service manager's SIGTERM reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(folder,), name="lifeline", daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outbox.setsockopt(zmq.LINGER, _LINGER_MS)
    inbox.set_hwm(0)
    inbox.bind(endpoint(folder, TO_CORE))
    outbox.set_hwm(0)
    outbox.connect(endpoint(folder, FROM_CORE))
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromCore) -> None:
        outbox.send(encoder.encode(message))

    spec = msgspec.msgpack.decode(inbox.recv(), type=CoreSpec)
    is_well = CoreLoop(ZmqInbox(inbox), send, owns_process=True).run(spec)
    inbox.close(0)
    outbox.close()
    context.term()
    return 0 if is_well else 1


def _end_with_parent(folder: str) -> None:
    while os.read(0, 4096):
        pass
    for _ in range(100):  # the main thread may be putting its sockets there at this moment
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(
        stream=sys.stderr, level=int(sys.argv[2]), format="%(levelname)s %(name)s: %(message)s"
    )
    sys.exit(main(sys.argv[1]))
