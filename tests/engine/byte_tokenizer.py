"""A real tokenizer with one token a byte and a few special and merged tokens, for tests of text."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.tokenizer.base import SpecialTokens, Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are bytes in the alphabet's order, 256 is "<eos>", which is special."""
    backend = Backend(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    special = SpecialTokens(None, 256, {"eos_token": "<eos>"}, {"default": CHAT_TEMPLATE})
    return Tokenizer(backend, special, "test")


EOS = 256
VOCAB = 257
