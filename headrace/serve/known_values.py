"""Which values a field of a struct may have, where msgspec only says that one is wrong."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Literal

import msgspec

_STEP = re.compile(r"\.(\w+)|(\[[^\]]*\])")


def known_values(kind: type[msgspec.Struct], path: str) -> list[Any]:
    """The values of a ``Literal`` or of the tags of a union of structs.

    Args:
        path: as msgspec writes it, without "$": ".messages[0].content[...].type".
    """
    found: list[Any] = [kind]
    tags: list[Any] = []
    for name, index in _STEP.findall(path):
        options = [option for one in found for option in _options(one)]
        if index:
            found = [
                typing.get_args(option)[-1] for option in options if typing.get_origin(option) in (list, dict)
            ]
            continue
        structs = [
            option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)
        ]
        tags = [one.__struct_config__.tag for one in structs if one.__struct_config__.tag_field == name]
        hints = [typing.get_type_hints(one) for one in structs]
        found = [own[name] for own in hints if name in own]
    values = [value for one in found for option in _options(one) for value in _literals(option)]
    return values or tags


def _options(hint: Any) -> list[Any]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return list(typing.get_args(hint)) if is_union else [hint]


def _literals(hint: Any) -> list[Any]:
    return list(typing.get_args(hint)) if typing.get_origin(hint) is Literal else []
