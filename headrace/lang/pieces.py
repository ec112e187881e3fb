"""What a program adds to its state: text, generated text, a choice, and turns of a conversation made of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError
from headrace.lang.backend import GenSpec
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputsParams


class Piece:
    """Anything that can be added to a state; pieces and texts add up with ``+``."""

    def __add__(self, other: Piece | str) -> Pieces:
        return Pieces((*_flat(self), *_flat(other)))

    def __radd__(self, other: str) -> Pieces:
        return Pieces((*_flat(other), *_flat(self)))


@dataclass(frozen=True)
class Text(Piece):
    """Text as it is."""

    text: str


@dataclass(frozen=True)
class Gen(Piece):
    """Text that the model writes, kept as variable ``name``."""

    name: str
    spec: GenSpec


@dataclass(frozen=True)
class Select(Piece):
    """The choice that the model finds likeliest, kept as variable ``name``."""

    name: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Turn(Piece):
    """A whole message of one role."""

    role: str
    parts: tuple[Piece, ...]


@dataclass(frozen=True)
class Pieces(Piece):
    """Several pieces, one after the other."""

    parts: tuple[Piece, ...]


def gen(
    name: str,
    *,
    max_tokens: int | None = 128,
    stop: str | Sequence[str] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    regex: str | None = None,
    json: dict[str, Any] | None = None,
    choices: Sequence[str] | None = None,
) -> Gen:
    """Text that the model writes. Raises RequestError for what no backend would take.

    Args:
        name: the variable that holds it.
        stop: texts that end it; they are not part of it.
        temperature: 0 is the likeliest token each time.
        regex, json, choices: what the text must be: a match, a document of a JSON Schema, one of some texts. The model
            writes it token by token; ``select`` compares whole choices instead.
    """
    _check_name(name)
    given = {"regex": regex, "json": json, "choice": _as_list(choices)}
    constraint = {kind: value for kind, value in given.items() if value is not None}
    if len(constraint) > 1:
        raise RequestError(f"gen({name!r}) has {' and '.join(constraint)}; one constraint at most is allowed")
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable | None) else tuple(stop or ())
    spec = GenSpec(max_tokens, stops, temperature, top_p, seed, constraint)
    checked = StructuredOutputsParams(**constraint) if constraint else None
    SamplingParams(**spec.fields(), structured_outputs=checked)
    return Gen(name, spec)


def _as_list(choices: Any) -> Any:
    """Any sequence of texts as a list; what is none (one text, say) is refused as it is."""
    return list(choices) if isinstance(choices, Iterable) and not isinstance(choices, str) else choices


def select(name: str, choices: Sequence[str]) -> Select:
    """The choice of highest log-probability per token, given all that comes before. All are scored in one batch.

    Raises: RequestError without choices, for empty ones and for one that is there twice.
    """
    _check_name(name)
    own = tuple(choices) if isinstance(choices, Iterable) else ()
    if isinstance(choices, str) or not own or not all(isinstance(choice, str) and choice for choice in own):
        raise RequestError(f"select({name!r}) needs a list of non-empty texts; got {choices!r:.100}")
    if len(set(own)) < len(own):
        raise RequestError(f"select({name!r}) has one choice twice: {choices!r:.100}")
    return Select(name, own)


def system(*parts: Piece | str) -> Turn:
    """A message of the system."""
    return _turn("system", parts)


def user(*parts: Piece | str) -> Turn:
    """A message of the user."""
    return _turn("user", parts)


def assistant(*parts: Piece | str) -> Turn:
    """A message of the model: the only one with ``gen`` and ``select`` in it."""
    return _turn("assistant", parts)


def _turn(role: str, parts: Sequence[Piece | str]) -> Turn:
    flat = tuple(piece for part in parts for piece in _flat(part))
    for piece in flat:
        if isinstance(piece, Turn):
            raise RequestError(
                f"a message of the {piece.role} stands inside one of the {role}: put them side by side"
            )
        if role != "assistant" and not isinstance(piece, Text):
            raise RequestError(
                f"gen and select write for the assistant; they cannot stand in a message of the {role}"
            )
    return Turn(role, flat)


def flatten(piece: Piece | str) -> tuple[Piece, ...]:
    """The single pieces of what was added to a state. Raises RequestError for what is no piece."""
    return _flat(piece)


def _flat(piece: Any) -> tuple[Piece, ...]:
    if isinstance(piece, str):
        return (Text(piece),) if piece else ()
    if isinstance(piece, Pieces):
        return piece.parts
    if isinstance(piece, Piece):
        return (piece,)
    raise RequestError(f"a state takes text, gen, select and roles; got {type(piece).__name__}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise RequestError(f"a variable's name must be a non-empty text; got {name!r:.100}")
