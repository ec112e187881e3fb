"""Names that nothing here has: refused with the nearest that are known, wherever a user may write one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.errors import RequestError

_MOST_LISTED = 12
_SHOWN_CHARS = 100

_COUNTERPARTS = {
    "cpu_offload_gb": "weights stay on the device; quantization makes them smaller",
    "enable_chunked_prefill": "long prompts are always computed in chunks; leave it out",
    "enforce_eager": "max_graph_tokens 0 does without CUDA graphs",
    "swap_space": "host_cache_bytes keeps cached blocks in host memory",
    "trust_remote_code": "code that comes with a model is never run; leave it out",
}
"""Options of vLLM by which its users know what is done otherwise here."""


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """A sentence about a name that is not known, with the nearest that is."""
    known = sorted(known)
    text = str(name)[:_SHOWN_CHARS]
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif len(known) <= _MOST_LISTED:
        hint = f"known: {', '.join(known)}"
    else:
        hint = f"the nearest are {', '.join(difflib.get_close_matches(text, known, n=3, cutoff=0.0))}"
    return f"unknown {what} {(text if isinstance(name, str) else name)!r}; {hint}"


def counterpart(option: str) -> str | None:
    """What is done here where vLLM has ``option`` (as ``enforce_eager``), if that has another name or is none."""
    return _COUNTERPARTS.get(option)


class NamedFields(msgspec.StructMeta):
    """Of structs that users construct: a field that is not there is a RequestError, not a bare TypeError."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct. Raises RequestError for an unknown field, or for values without names."""
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            for name in kwargs:
                if name not in cls.__struct_fields__:
                    sentence = unknown_name("parameter", name, cls.__struct_fields__)
                    raise RequestError(f"{cls.__name__}: {sentence}", param=name) from None
            if args:
                example = cls.__struct_fields__[0]
                raise RequestError(f"{cls.__name__} takes its values by name, as {example}=…") from None
            raise
