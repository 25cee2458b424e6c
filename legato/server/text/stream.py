"""Incremental text: tokens in, text out, cut exactly at the first stop string that is completed.

Owns UTF-8 that is split across tokens, and stop strings. Every result is independent of how the tokens are cut into steps. Knows
tokens by their bytes only, and nothing of an answer's structure. Called once per step and request by `LLM`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from legato.server.text.tokenizer import Tokenizer


class StopMatcher:
    """Looks for the earliest completed stop string in text that arrives character by character.

    One Knuth-Morris-Pratt automaton per string. Of strings completed by the same character the longest wins, so the result
    does not depend on their order.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string cannot be empty")
        self.strings = tuple(strings)
        self._borders = [_borders(string) for string in self.strings]
        self._matched = [0] * len(self.strings)

    @property
    def held(self) -> int:
        """How many of the last characters could be the start of a stop string."""
        return max(self._matched, default=0)

    def advance(self, character: str) -> str | None:
        """Takes the next character; returns the stop string that it completes, if any."""
        completed: str | None = None
        for number, string in enumerate(self.strings):
            matched, borders = self._matched[number], self._borders[number]
            while matched and (matched == len(string) or string[matched] != character):
                matched = borders[matched - 1]
            matched += string[matched] == character
            self._matched[number] = matched
            if matched == len(string) and (completed is None or len(string) > len(completed)):
                completed = string
        return completed

    def reset(self) -> None:
        """Forgets the text so far."""
        self._matched = [0] * len(self.strings)


def _borders(string: str) -> list[int]:
    """For every prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for end in range(1, len(string)):
        while length and string[end] != string[length]:
            length = borders[length - 1]
        length += string[end] == string[length]
        borders[end] = length
    return borders


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a step added: `text` that is safe to show, and how many of its tokens belong to the answer.

    `num_tokens` is smaller than the number of tokens given when a stop string was completed among them: the token that
    completes it is the last that counts (ids and log-probabilities are cut there). `stop` is that stop string.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class TextStream:
    """Turns the tokens of one request into text, holding back whatever could still change.

    Held back: bytes of an unfinished UTF-8 character, and text that could be the start of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop)
        self._pending = ""
        self._ended = False

    def push(self, ids: Iterable[int]) -> TextDelta:
        """Takes the tokens of one step. After a stop string has been completed further tokens count for nothing."""
        if self._ended:
            return TextDelta("", 0)
        count = 0
        for index in ids:
            count += 1
            stop = self._take(self._decoder.decode(self._tokenizer.token_bytes(index)))
            if stop is not None:
                return TextDelta(self._end(), count, stop)
        ready = len(self._pending) - self._matcher.held
        text, self._pending = self._pending[:ready], self._pending[ready:]
        return TextDelta(text, count)

    def finish(self) -> TextDelta:
        """Ends the text without a stop string: what was held back comes out, an unfinished character as U+FFFD."""
        if self._ended:
            return TextDelta("", 0)
        stop = self._take(self._decoder.decode(b"", final=True))
        return TextDelta(self._end(), 0, stop)

    def _take(self, text: str) -> str | None:
        """Adds text to what is pending; at a completed stop string the pending text ends before it."""
        if not self._matcher.strings:
            self._pending += text
            return None
        for position, character in enumerate(text):
            stop = self._matcher.advance(character)
            if stop is not None:
                self._pending = (self._pending + text[: position + 1])[: -len(stop)]
                return stop
        self._pending += text
        return None

    def _end(self) -> str:
        self._ended = True
        text, self._pending = self._pending, ""
        return text
