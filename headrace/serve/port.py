"""The listening socket, opened before anything slow is imported."""

from __future__ import annotations

import errno
import socket

from headrace.errors import ConfigError
from headrace.serve.settings import ServerConfig

_BACKLOG = 2048


def open_port(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError when the address is taken or not ours."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is in use by another program: choose another --port, or end that program"
        else:
            reason = f"cannot be listened on: {error.strerror or error}"
        raise ConfigError(f"port {config.port} of {config.host} {reason}") from None
