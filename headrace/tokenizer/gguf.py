"""load_gguf_tokenizer: a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.config_fields import ConfigFields
from headrace.checkpoint.gguf_file import GGUFFile, GGUFStrings
from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.tokenizer.base import SpecialTokens, Tokenizer
from headrace.tokenizer.gguf_pretokenizers import build_pre_tokenizer, pre_tokenizer_spec
from headrace.tokenizer.sentencepiece_merges import cached_merges

if TYPE_CHECKING:
    import tokenizers

_SPACE_MARK = "\u2581"


class TokenType(IntEnum):
    """What a vocabulary entry is, as GGUF files say it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The tokenizer's part of a file's metadata, checked.

    Attributes:
        where: the file, for messages.
        fields: keys below ``tokenizer.ggml.``.
        pieces: one per id.
        types: one ``TokenType`` number per id.
    """

    where: str
    fields: ConfigFields
    pieces: list[str]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], where: str) -> GGUFVocabulary:
        """Takes the vocabulary from metadata.

        Raises:
            CheckpointError: a missing, ill-typed or contradictory key; the message names it.
        """
        fields = ConfigFields(metadata, where, prefix="tokenizer.ggml.")
        tokens = fields.raw("tokens")
        if not isinstance(tokens, GGUFStrings) or not len(tokens):
            fields.fail("tokens", "is missing or not a list of strings; the file has no vocabulary")
        pieces = tokens.to_list()
        types = fields.raw("token_type") or (TokenType.NORMAL,) * len(pieces)
        if not isinstance(types, tuple) or len(types) != len(pieces):
            fields.fail("token_type", f"does not have one number for each of the {len(pieces)} tokens")
        if len(set(pieces)) != len(pieces):
            piece, _ = Counter(pieces).most_common(1)[0]
            fields.fail("tokens", f"has the token {piece!r} twice")
        return cls(where, fields, pieces, types)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """The id under ``key``, or ``default`` when absent."""
        ids = self.fields.token_ids(key)
        if ids and ids[0] >= len(self.pieces):
            self.fields.fail(key, f"is {ids[0]}, outside the vocabulary of {len(self.pieces)}")
        return ids[0] if ids else default


def load_gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes: byte-level BPE or SentencePiece-like BPE.

    Raises:
        UnsupportedModelError: another kind of tokenizer or an unknown pre-tokenizer; the message names it.
        CheckpointError: a missing or wrong key; the message names the file and the key.
    """
    vocabulary = GGUFVocabulary.read(file.metadata, str(file.path))
    model = vocabulary.fields.text("model")
    if model == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(vocabulary)
    else:
        raise UnsupportedModelError(
            f"{file.path}: the tokenizer model '{model}' (key 'tokenizer.ggml.model') is not supported "
            "(known: gpt2 for byte-level BPE, llama for SentencePiece)"
        )
    _add_marked_tokens(backend, vocabulary)
    is_spm = model == "llama"
    bos = vocabulary.token_id("bos_token_id", 1 if is_spm else None)
    eos = vocabulary.token_id("eos_token_id", 2 if is_spm else None)
    first = bos if vocabulary.fields.flag("add_bos_token", adds_bos) else None
    last = eos if vocabulary.fields.flag("add_eos_token", False) else None
    _add_frame(backend, vocabulary, first, last)
    return Tokenizer(backend, _special_tokens(vocabulary, file.metadata, bos, eos), str(file.path))


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """(byte-level BPE without its special tokens, whether a start token is the default)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    fields = vocabulary.fields
    spec = pre_tokenizer_spec(fields.text("pre", "default"), vocabulary.where)
    merges = fields.raw("merges")
    if not isinstance(merges, GGUFStrings):
        fields.fail("merges", "is missing or not a list of strings")
    pairs = []
    for index, merge in enumerate(merges):
        # A space inside a piece is written in the byte alphabet, so the first space after a piece parts the two.
        left, _, right = merge.partition(" ")
        if not left or not right:
            fields.fail("merges", f"has at {index} {merge!r}, not two pieces with a space between")
        pairs.append((left, right))
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    try:
        model = models.BPE(ids, pairs, ignore_merges=spec.ignores_merges)
    except Exception as error:  # the library raises bare Exception for a merge whose pieces it does not know
        raise CheckpointError(f"{vocabulary.where}: key 'tokenizer.ggml.merges': {error}") from error
    backend = Backend(model)
    if spec.normalises_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(spec)
    backend.decoder = decoders.ByteLevel()
    return backend, spec.adds_bos


def _sentencepiece(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """(BPE by scores with byte fallback, whether a start token is the default)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    fields, pieces, types = vocabulary.fields, vocabulary.pieces, vocabulary.types
    scores = fields.raw("scores")
    if not isinstance(scores, tuple) or len(scores) != len(pieces):
        fields.fail("scores", f"does not have one number for each of the {len(pieces)} tokens")
    flat = cached_merges(pieces, scores, [kind == TokenType.NORMAL for kind in types])
    texts = [pieces[token_id] for token_id in flat]
    unknown = vocabulary.token_id("unknown_token_id", 0)
    assert unknown is not None
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)},
        list(zip(texts[::2], texts[1::2], strict=True)),
        unk_token=pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    has_prefix = fields.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE_MARK)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend, True


def _add_marked_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Tokens that are matched in the text before anything else: control tokens (special) and user-defined ones."""
    from tokenizers import AddedToken

    special, plain = [], []
    for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True):
        if not piece:
            continue
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(piece, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(piece, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_frame(
    backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, first: int | None, last: int | None
) -> None:
    """Puts the start and end tokens around encoded texts."""
    from tokenizers import processors

    # Names instead of the tokens' own texts, which may hold what the template's syntax takes for something else.
    framed = {name: token_id for name, token_id in (("first", first), ("last", last)) if token_id is not None}
    if not framed:
        return
    before, after = (["first:0"] if "first" in framed else []), (["last:0"] if "last" in framed else [])
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", "$B:0", *after],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [vocabulary.pieces[token_id]]}
            for name, token_id in framed.items()
        ],
    )


def _special_tokens(
    vocabulary: GGUFVocabulary, metadata: Mapping[str, Any], bos: int | None, eos: int | None
) -> SpecialTokens:
    unknown = vocabulary.token_id("unknown_token_id")
    padding = vocabulary.token_id("padding_token_id")
    named = {"bos_token": bos, "eos_token": eos, "unk_token": unknown, "pad_token": padding}
    texts = {name: vocabulary.pieces[token_id] for name, token_id in named.items() if token_id is not None}
    templates = {}
    fields = ConfigFields(metadata, vocabulary.where, prefix="tokenizer.")
    for key in metadata:
        if key == "tokenizer.chat_template":
            templates["default"] = fields.text("chat_template")
        elif key.startswith("tokenizer.chat_template."):
            name = key.removeprefix("tokenizer.")
            templates[name.removeprefix("chat_template.")] = fields.text(name)
    return SpecialTokens(bos, eos, texts, templates)
