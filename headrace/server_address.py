"""A server's address as users write it: with or without "http://" before host:port, a slash or "/v1" at its end."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from headrace.errors import RequestError

_SHOWN_CHARS = 100


def server_address(base_url: str) -> SplitResult:
    """The address's parts, its path up to and without "/v1" or a slash at the end. host:port alone is http.

    Raises: RequestError for what is no address of a server.
    """
    try:
        address = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        parts = urlsplit(address)
        if "://" not in address and urlsplit(f"http://{address}").port is not None:
            # Only with a port: a lone word is more likely a slip than a host that serves on port 80.
            parts = urlsplit(f"http://{address}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or above 65535, brackets that do not close
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise RequestError(
            f"{base_url[:_SHOWN_CHARS]!r} is no server's address; write it as http://host:8000",
            param="base_url",
        )
    return parts
