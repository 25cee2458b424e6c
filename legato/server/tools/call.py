"""One tool call while it is being written, in GLM's notation: a name, then keys and values between tags.

Owns what counts as a call and what becomes of one that is not well-formed: nothing is lost but a key that is cut, and whatever
has been said about a call is never taken back. Works on text and tags; knows nothing of tokens. Driven by
`server.answer.structure`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Literal

from legato.server.tools.arguments import NULLABLE_STRING, STRING, Types, json_string, json_value
from legato.server.tools.definitions import NAME, Tools

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
CALL_TAGS = (CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE)

Verdict = Literal["open", "done", "redo", "rejected"]
"""What a tag did to a call: it goes on; it is complete; it is complete, and the tag belongs to what follows; it never was one."""


class OpenCall:
    """A call that has begun: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`.

    Whitespace between the parts means nothing. The call is settled (`is_settled`) when its name is complete: at the first
    `<arg_key>`, or at `</tool_call>` for a call without arguments. What comes before that and is no name is no call: `raw` has
    everything, for the content. Once it is settled, text where none belongs is kept in `strays`, a missing end of a value or of
    the call is supplied where the next part says so, and a key without a value counts as stray text.

    Inside a value only `</arg_value>` and `</tool_call>` mean anything: other tags there are text of the value.
    """

    def __init__(self, tools: Tools, raw: str, on_start: Callable[[str, str], None], on_text: Callable[[str], None]):
        """`raw`: what stands for the opening in the content, should this be no call. `on_start` is told id and name, `on_text`
        each further piece of the arguments, whose pieces together are a JSON object."""
        self._tools, self._on_start, self._on_text = tools, on_start, on_text
        self.raw, self.strays = raw, ""
        self.is_settled = False
        self._name = ""
        self._part: Literal["name", "gap", "key", "before value", "value"] = "name"
        self._key = ""
        self._num_arguments = 0
        self._types: Types = STRING
        self._held: str | None = None

    def text(self, text: str) -> Verdict:
        """Takes text."""
        if self._part == "name":
            self.raw += text
            self._name += text
            bare = self._name.strip()
            return "open" if not bare or NAME.fullmatch(bare) else "rejected"
        if self._part == "key":
            self._key += text
        elif self._part == "value":
            self._value(text)
        else:
            self.strays += text
        return "open"

    def tag(self, tag: str) -> Verdict:
        """Takes a tag. Where the verdict is `redo` or `rejected` the tag has not been taken: it belongs to what follows."""
        if self._part == "name":
            return self._after_name(tag)
        if self._part == "value":
            if tag not in (END_VALUE, END_CALL):
                self._value(tag)
                return "open"
            self._end_value()
            return "open" if tag == END_VALUE else self.close()
        if self._part in ("key", "before value"):
            if tag == VALUE:
                self._begin_value()
                return "open"
            if self._part == "key" and tag == END_KEY:
                self._part = "before value"
                return "open"
            self._drop_key()
        return self._in_gap(tag)

    def close(self) -> Verdict:
        """Ends the call as the model meant it, completing what it left open."""
        if self._part == "value":
            self._end_value()
        elif self._part in ("key", "before value"):
            self._drop_key()
        self._on_text("}" if self._num_arguments else "{}")
        self.strays = self.strays.strip()
        return "done"

    def cut(self) -> None:
        """Ends the call where the tokens ended: its arguments stay unfinished, and so visibly are no JSON.

        A key whose value had not begun is gone: it belongs to the call, whose arguments cannot hold it."""
        if self._part == "value" and self._held is not None:
            self._on_text(self._held)
        self.strays = self.strays.strip()

    def _after_name(self, tag: str) -> Verdict:
        name = self._name.strip()
        if tag not in (KEY, END_CALL) or NAME.fullmatch(name) is None:
            return "rejected"
        self.is_settled, self._part = True, "gap"
        self._on_start(f"call_{secrets.token_hex(12)}", name)
        self._name = name
        return self._in_gap(tag)

    def _in_gap(self, tag: str) -> Verdict:
        if tag == KEY:
            self._part, self._key = "key", ""
            return "open"
        if tag in (CALL, END_CALL):
            done = self.close()
            return done if tag == END_CALL else "redo"
        self.strays += tag
        return "open"

    def _drop_key(self) -> None:
        self.strays += f"{KEY}{self._key}{END_KEY if self._part == 'before value' else ''}"
        self._part = "gap"

    def _begin_value(self) -> None:
        key = self._key.strip()
        self._on_text(f"{', ' if self._num_arguments else '{'}{json_string(key)}: ")
        self._num_arguments += 1
        self._types = self._tools.argument_types(self._name, key)
        self._part = "value"
        self._held = None if self._types == STRING else ""
        if self._held is None:
            self._on_text('"')

    def _value(self, text: str) -> None:
        if self._held is None:
            self._on_text(json_string(text)[1:-1])
            return
        self._held += text
        if self._types == NULLABLE_STRING and not "null".startswith(self._held):
            # It can only be a string now, so that it need not wait for its end.
            held, self._held = self._held, None
            self._on_text(json_string(held)[:-1])

    def _end_value(self) -> None:
        self._on_text('"' if self._held is None else json_value(self._held, self._types))
        self._held, self._part = None, "gap"
