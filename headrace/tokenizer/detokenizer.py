"""IncrementalDetokenizer: token ids as they come -> text that is final, with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from headrace.tokenizer.base import Tokenizer
from headrace.tokenizer.stop_matcher import StopMatcher

_UTF8 = codecs.getincrementaldecoder("utf-8")

_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Decodes one answer. Each ``append`` gives only text that nothing later can change.

    Bytes of an unfinished character and text that may still become a stop string are held back. However the ids are
    divided among calls, the text in the end is the same: ``tokenizer.decode`` of all of them, up to the stop string.
    After a prompt that has text of its own, a first space is kept; an unfinished character at the prompt's end is
    finished by the answer.

    Attributes:
        stop_reason: the stop string that was found, or None.
        num_tokens_used: ids taken in so far, up to and including the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        may_end: Callable[[str], bool] | None = None,
    ) -> None:
        """``stop`` strings are looked for in the text of tokens after the first ``min_tokens``. One is text like any
        other where ``may_end`` says no to the text before it."""
        self.stop_reason: str | None = None
        self.num_tokens_used = 0
        self._bytes = tokenizer.byte_table(skip_special_tokens)
        self._decoder = _UTF8("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._may_end = may_end
        self._held = ""
        self._pieces: list[str] = []
        self._token_texts: list[str] = []
        self._has_bytes = False
        self._is_at_start = tokenizer.strips_first_space
        self._take_prompt(prompt_ids)

    def _take_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Loads the decoder with an unfinished character, and finds whether any text goes before the answer."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes[token_id] + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        self._decoder.decode(tail)
        self._is_at_start = self._is_at_start and not tail

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found; ids after it are ignored."""
        return self.stop_reason is not None

    @property
    def token_texts(self) -> Sequence[str]:
        """For each id used, the characters it finished; they join to the text, but for a stop string's end.

        A character made by several tokens belongs to the last of them.
        """
        return self._token_texts

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids and gives the text that has become final."""
        if self.stop_reason is not None:
            return ""
        fresh = ""
        for token_id in token_ids:
            data = self._bytes[token_id]
            if data and not self._has_bytes:
                self._has_bytes = True
                if self._is_at_start:
                    data = data.removeprefix(b" ")
            text = self._decoder.decode(data)
            self.num_tokens_used += 1
            self._token_texts.append(text)
            if text:
                fresh += self._release(text, fresh)
                if self.stop_reason is not None:
                    break
        return self._give(fresh)

    def flush(self) -> str:
        """Ends the answer: gives back what was held, with U+FFFD for bytes that never became a character."""
        if self.stop_reason is not None or not self._has_bytes:
            # Without bytes of its own the answer has no text; what the prompt left unfinished is the prompt's.
            return ""
        rest = self._decoder.decode(b"", final=True)
        if rest and self._token_texts:
            self._token_texts[-1] += rest
        fresh = self._release(rest, "") if rest else ""
        if self.stop_reason is None:
            fresh += self._held
            self._held = ""
        return self._give(fresh)

    def _give(self, fresh: str) -> str:
        if fresh:
            self._pieces.append(fresh)
        return fresh

    def _release(self, text: str, fresh: str) -> str:
        """Adds decoded text and takes away what is final; sets ``stop_reason`` when a stop string is complete.

        Args:
            fresh: final text that is not in ``text`` yet.
        """
        matcher = self._matcher
        if matcher is None or self.num_tokens_used <= self._min_tokens:
            return text
        held, num_fed = self._held + text, 0
        while (found := matcher.feed(text[num_fed:])) is not None:
            num_fed += found[0]
            end = len(self._held) + num_fed
            start = end - found[1]
            if self._may_end is None or self._may_end(self.text + fresh + held[:start]):
                self.stop_reason = held[start:end]
                self._held = ""
                return held[: end if self._includes_stop else start]
        num_final = len(held) - matcher.depth
        self._held = held[num_final:]
        return held[:num_final]
