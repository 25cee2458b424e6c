"""Tools that take a text instead of arguments: shown to a model as functions of one argument, and read back as that text.

Owns the argument, the grammar that the text may have to follow, and the way from the pieces of a call's arguments back to the
pieces of the text. Knows nothing of tokens or of any API's form. Called by `server.tools.definitions`, `server.text.messages` and
the APIs that have such tools; `server.answer.constraint` enforces the grammar.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

INPUT = "input"
"""The argument that holds the text."""
_START = re.compile(r'\{\s*"input"\s*:\s*"')
_READABLE = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
"""What can be read already of a JSON string, as `arguments` writes them: to its closing quote, or to an unfinished escape."""


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """What a text must follow as a whole: a grammar in llguidance's Lark notation, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


def parameters(grammar: TextGrammar | None) -> dict[str, Any]:
    """The JSON schema of a free-form tool's only argument."""
    told = "The whole input of the tool, as plain text."
    if grammar is not None:
        kind = "grammar, in Lark notation" if grammar.syntax == "lark" else "regular expression"
        told += f" It follows this {kind}:\n{grammar.definition}"
    text = {"type": "string", "description": told}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def arguments_of(text: str) -> dict[str, str]:
    """The arguments of a call with this text."""
    return {INPUT: text}


def text_of(arguments: str) -> str:
    """The text of a call, from its arguments as JSON, finished or not: that of `input`, if they begin with it. Whatever else a
    model has written instead is the text as it stands, so that nothing of it is lost."""
    reader = TextReader()
    return reader.take(arguments) + reader.end()


class TextReader:
    """The text of a call, piece by piece, from the pieces of its arguments. However they are cut, the text is the same."""

    def __init__(self) -> None:
        self._unread = ""
        self._part: Literal["start", "text", "rest"] = "start"

    def take(self, arguments: str) -> str:
        """Takes a piece of the arguments, and gives what it adds to the text."""
        if self._part == "rest":
            return ""
        self._unread += arguments
        if self._part == "start":
            start = _START.match(self._unread)
            if start is None:
                return ""
            self._part, self._unread = "text", self._unread[start.end() :]
        return self._readable()

    def end(self) -> str:
        """What is left when nothing more comes."""
        left, self._unread = self._unread, ""
        return left if self._part == "start" and left != "{}" else ""

    def _readable(self) -> str:
        match = _READABLE.match(self._unread)
        piece = match[0] if match else ""
        self._unread = self._unread[len(piece) :]
        if self._unread.startswith('"'):
            self._part, self._unread = "rest", ""
        return json.loads(f'"{piece}"', strict=False)
