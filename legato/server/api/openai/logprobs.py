"""Log-probabilities in the two forms of the OpenAI API: a list of objects (chat), and parallel arrays (text completions).

Owns how a token is written as text and that every number is one JSON has. Knows tokens and offsets, no requests. Called by
`server.api.openai.chat_reply` and `server.api.openai.completions`.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence

from legato.server.api.openai.schema import ChatLogprobs, CompletionLogprobs, TokenLogprobReply, TopLogprob
from legato.server.text.tokenizer import Tokenizer
from legato.types import TokenLogprob

LOGPROB_SIZE = 40
"""A token with its alternatives costs as much time as tokenizing about so many characters."""

LOWEST = -9999.0
"""What stands for minus infinity, which JSON has no number for."""


def finite(value: float) -> float:
    """A log-probability as JSON can say it."""
    return value if math.isfinite(value) else LOWEST


def token_text(tokenizer: Tokenizer, index: int) -> str:
    """A token as text. Bytes that are no characters by themselves become `bytes:\\xe4\\xbd`, so that different tokens stay
    different; control tokens are written as in a template."""
    data = tokenizer.token_bytes(index)
    if not data:
        return tokenizer.control_text(index) or ""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob], num_top: int) -> ChatLogprobs:
    """The form of chat completions."""
    return {"content": [_entry(tokenizer, entry, num_top) for entry in logprobs]}


def _entry(tokenizer: Tokenizer, entry: TokenLogprob, num_top: int) -> TokenLogprobReply:
    chosen = _top(tokenizer, entry.token_id, entry.logprob)
    rivals = [_top(tokenizer, token, logprob) for token, logprob in entry.top[:num_top]]
    return {**chosen, "top_logprobs": rivals}


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token)
    return {"token": token_text(tokenizer, token), "logprob": finite(logprob), "bytes": list(data) or None}


class CompletionArrays:
    """Builds the arrays of text completions, token after token, with offsets into the text that they make together."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def arrays(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """The arrays of the next tokens. `None`: the first token of a prompt, which has no log-probability."""
        offsets: list[int] = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return {
            "tokens": [token_text(self._tokenizer, token) for token in ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [None if entry is None else self._tops(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _tops(self, entry: TokenLogprob) -> dict[str, float]:
        """The best alternatives and the chosen token. Of tokens with the same text the most likely one counts."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._num_top], (entry.token_id, entry.logprob)):
            text = token_text(self._tokenizer, token)
            found[text] = max(finite(logprob), found.get(text, -math.inf))
        return found
