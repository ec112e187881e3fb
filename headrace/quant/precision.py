"""Precision: in which form each module's weights are kept, as users say it.

A form is "auto" (as the checkpoint has them), "none" (dense, in the compute type) or a rounding: "int8" or "int4", with
"-g32", "-g64", "-g128" for the size of groups or "-channel" for a scale a row, and "-zp" for zero points.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from headrace.errors import ConfigError

_FORM = re.compile(r"int(?P<bits>4|8)(-g(?P<group>32|64|128)|-(?P<channel>channel))?(?P<zero>-zp)?")
_EXAMPLES = (
    "auto, none, int8, int4, and with a group and zero points int8-channel, int8-g128, int4-g64, int4-g128-zp"
)

INT4_GROUP = 32


@dataclass(frozen=True, slots=True)
class Rounding:
    """Round weights to integers.

    bits: 4 or 8.
    group_columns: columns that share a scale; None: a whole row.
    has_zero_points: whether groups have a minimum, too, instead of being symmetric around zero.
    """

    bits: int
    group_columns: int | None
    has_zero_points: bool = False

    def __str__(self) -> str:
        """As ``parse_form`` reads it."""
        group = "channel" if self.group_columns is None else f"g{self.group_columns}"
        return f"int{self.bits}-{group}" + ("-zp" if self.has_zero_points else "")


Form = Literal["auto", "none"] | Rounding

EMBEDDING_ROUNDING = Rounding(8, 32)
"""Tables of the vocabulary do badly with 4 bits, and are a small part of a large model."""

_VOCABULARY = ("model.embed_tokens", "lm_head")


def parse_form(text: str) -> Form:
    """The form that ``text`` spells.

    Raises:
        ConfigError: none does; the message lists the known ones.
    """
    if text == "auto":
        return "auto"
    if text == "none":
        return "none"
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f"quantization {text!r} is not known; known: {_EXAMPLES}")
    bits, has_zero_points = int(match["bits"]), match["zero"] is not None
    if match["group"] is not None:
        return Rounding(bits, int(match["group"]), has_zero_points)
    if match["channel"] is not None:
        return Rounding(bits, None, has_zero_points)
    # 4 bits need small groups and zero points to be worth having; 8 bits are exact enough with a scale a row.
    return Rounding(8, None, has_zero_points) if bits == 8 else Rounding(4, INT4_GROUP, True)


@dataclass(frozen=True, slots=True)
class Precision:
    """Attributes:
    form: of every module that no override names.
    overrides: (pattern of module names, form), the first match counts.
    inputs: what packed matrices are multiplied with: "float" as they are, "int16" and "int8" rounded to so many bits
        with a scale for each 32 columns, "auto" int16 on a CPU that has kernels for it.
    """

    form: Form = "auto"
    overrides: Sequence[tuple[str, Form]] = ()
    inputs: Literal["auto", "int8", "int16", "float"] = "auto"
    _asked: set[str] = field(default_factory=set, compare=False)
    """Names that ``form_of`` was asked for: the model's modules, once it is built."""

    @classmethod
    def parse(
        cls,
        form: str,
        overrides: str | None = None,
        inputs: Literal["auto", "int8", "int16", "float"] = "auto",
    ) -> Precision:
        """From the settings ``quantization``, ``quantization_overrides`` and ``linear_inputs``.

        Raises:
            ConfigError: a form or an override that cannot be read.
        """
        pairs: list[tuple[str, Form]] = []
        for entry in (overrides or "").split(","):
            pattern, equals, text = entry.strip().partition("=")
            if not equals and not pattern:
                continue
            if not equals or not pattern:
                raise ConfigError(
                    f"quantization_overrides has {entry.strip()!r}; write pattern=form, such as "
                    "'lm_head=int8,model.layers.0.*=none'"
                )
            pairs.append((pattern.strip(), parse_form(text.strip())))
        return cls(parse_form(form), tuple(pairs), inputs)

    def form_of(self, name: str) -> Form:
        """The form of the module ``name`` ("model.layers.0.mlp.down_proj")."""
        self._asked.add(name)
        for pattern, form in self.overrides:
            if fnmatchcase(name, pattern):
                return form
        if isinstance(self.form, Rounding) and self.form.bits == 4 and name in _VOCABULARY:
            return EMBEDDING_ROUNDING
        return self.form

    def check_overrides(self) -> None:
        """Once the whole model was built: each override names a module of it. Raises ConfigError.

        The vocabulary's two modules may be named for any model; where they are one, the table's form counts.
        """
        names = self._asked | set(_VOCABULARY)
        for pattern, _ in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, 1, 0.5) or sorted(names)[:1]
                raise ConfigError(
                    f"quantization_overrides names {pattern!r}, which no module of the model matches; modules are "
                    f"called as {close[0]!r}"
                )
