"""ServerConfig: settings of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import knob
from headrace.errors import ConfigError
from headrace.serve.tools.reasoning import REASONING_PARSERS
from headrace.serve.tools.registry import FORMATS


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens and what it lets through."""

    host: str = knob("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = knob(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = knob(None, "key that clients must send as a bearer token")
    cors_origins: str | None = knob(None, "web origins that may call from a browser, comma-separated, or *")
    max_body_bytes: int = knob(16 << 20, "largest request body")
    load_wait_s: float = knob(
        120.0, "a request that comes while the model loads waits this long, then gets a 503"
    )
    drain_s: float = knob(120.0, "on SIGTERM, running answers may take this long to end")

    tool_parser: str = knob(
        "auto", f"how the model writes tool calls: auto (by its chat template), {', '.join(FORMATS)}"
    )
    reasoning_parser: str = knob(
        "auto", f"tags around reasoning: auto (by the chat template), none, {', '.join(REASONING_PARSERS)}"
    )

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1024, 1 << 32),
            ("load_wait_s", 0, 1e6),
            ("drain_s", 0, 1e6),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be in [{low:g}, {high:g}]; got {value:g}")
        _one_of("tool_parser", self.tool_parser, ["auto", *FORMATS])
        _one_of("reasoning_parser", self.reasoning_parser, ["auto", "none", *REASONING_PARSERS])
        if self.api_key == "":
            raise ConfigError("api_key is empty: leave it out to serve without a key")


def _one_of(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")
