"""Log-probabilities from the engine core, as the dictionaries that users get."""

from __future__ import annotations

from headrace.core.output import TokenLogprobs
from headrace.outputs import Logprob
from headrace.tokenizer.base import Tokenizer


def logprob_dict(
    entry: TokenLogprobs, tokenizer: Tokenizer | None, own_text: str | None = None
) -> dict[int, Logprob]:
    """{token id: Logprob} of one position: the token itself first, then the top ones.

    Args:
        tokenizer: None leaves ``decoded_token`` empty (None).
        own_text: text of the token itself where its neighbours decide it (a part of a character).
    """
    token_ids, logprobs = entry.token_ids, entry.logprobs
    token = token_ids[0]
    if tokenizer is None:
        own_text = None
    elif own_text is None:
        own_text = tokenizer.token_text(token)
    positions = {token: Logprob(logprobs[0], entry.rank, own_text)}
    for index in range(1, len(token_ids)):
        other = token_ids[index]
        if other != token:
            text = tokenizer.token_text(other) if tokenizer is not None else None
            positions[other] = Logprob(logprobs[index], index, text)
    return positions
