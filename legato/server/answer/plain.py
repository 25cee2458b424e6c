"""The answer to a plain prompt: text up to a stop string, in the same steps and events as `server.answer.structure` has.

Owns nothing but that form; knows no reasoning and no tools. The completion routes read their choices with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legato.server.answer.events import AnswerMessage, ContentText, Phase, Step
from legato.server.text.stream import TextDelta, TextStream
from legato.server.text.tokenizer import Tokenizer
from legato.types import FinishReason


class PlainText:
    """Reads one choice as text. Control tokens that a tokenizer hides stay hidden, tags are text.

    `keep_stop`: the text ends with the stop string instead of before it.
    """

    phase: Phase = "content"
    reasoning_tokens = 0
    has_tool_calls = False

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        self._stream = TextStream(tokenizer, stop)
        self._keep_stop = keep_stop
        self._pieces: list[str] = []

    @property
    def message(self) -> AnswerMessage:
        """The text so far."""
        return AnswerMessage("", "".join(self._pieces), ())

    def push(self, ids: Iterable[int]) -> Step:
        """Takes the tokens of one step."""
        return self._step(self._stream.push(ids))

    def finish(self, reason: FinishReason) -> Step:
        """What was held back comes out, whatever the reason."""
        return self._step(self._stream.finish())

    def _step(self, delta: TextDelta) -> Step:
        text = delta.text + (delta.stop or "" if self._keep_stop else "")
        if not text:
            return Step((), delta.num_tokens, delta.stop)
        self._pieces.append(text)
        return Step((ContentText(text),), delta.num_tokens, delta.stop)
