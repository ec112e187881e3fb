r"""Pre-tokenizers of byte-level BPE vocabularies, by the name that GGUF files give them.

A pre-tokenizer is a list of patterns, applied one after the other: each cuts the pieces that the one before left, and
both matches and what lies between them become pieces. The patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """How text is cut before the merges of byte-level BPE.

    Attributes:
        patterns: regular expressions, in order.
        ignores_merges: whether a piece that is a token as a whole is taken without merging.
        normalises_nfc: whether text is brought to Unicode's composed form first.
        adds_bos: whether a start token is put first where the file does not say.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    normalises_nfc: bool = False
    adds_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
# DeepSeek's own class lists the letters with case one by one; it leaves out the mathematical alphabets, and a few
# rare letters that this one has.
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1D400}-\x{1D7FF}]]"
_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"

_SPECS: dict[tuple[str, ...], PreTokenizerSpec] = {
    ("default",): PreTokenizerSpec((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe"): PreTokenizerSpec((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): PreTokenizerSpec(
        (r"\p{N}", _GPT2)
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3"): PreTokenizerSpec(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizerSpec((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen"): PreTokenizerSpec((_QWEN2,), normalises_nfc=True),
    ("stablelm2",): PreTokenizerSpec((_QWEN2,)),
    ("tekken",): PreTokenizerSpec((_TEKKEN,), ignores_merges=True, adds_bos=True),
    ("deepseek-llm",): PreTokenizerSpec(
        (r"[\r\n]", rf"\s?{_CASED}+", _DEEPSEEK_MARKS, r"\s+$", _CJK, r"\p{N}"),
    ),
    ("deepseek-coder",): PreTokenizerSpec((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ("falcon",): PreTokenizerSpec((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}

_BY_NAME = {name: spec for names, spec in _SPECS.items() for name in names}


def pre_tokenizer_spec(name: str, where: str) -> PreTokenizerSpec:
    """The pre-tokenizer that a file names in ``tokenizer.ggml.pre``.

    Raises:
        UnsupportedModelError: an unknown name; guessing one would give wrong tokens. The known ones are listed.
    """
    spec = _BY_NAME.get(name)
    if spec is None:
        raise UnsupportedModelError(
            f"{where}: the pre-tokenizer '{name}' (key 'tokenizer.ggml.pre') is not supported "
            f"(known: {', '.join(sorted(_BY_NAME))}); a Hugging Face folder of the model would work"
        )
    return spec


def build_pre_tokenizer(spec: PreTokenizerSpec) -> pre_tokenizers.PreTokenizer:
    """The ``tokenizers`` object: the cuts, then GPT-2's byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in spec.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
