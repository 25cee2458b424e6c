"""Messages to a prompt: the checkpoint's own chat template, rendered so that only the template writes control tokens.

Owns the sandboxed template environment, the checks on template arguments, reasoning effort, and the guarding of user text. Knows
nothing of HTTP or the engine. `LLM.chat`, the command line and the HTTP dialects call it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, cast

import jinja2
import jinja2.meta
import jinja2.sandbox

from legato.server.text.messages import ChatError, Message, normal_messages
from legato.server.text.tokenizer import GUARD, TextFiles, Tokenizer, json_object

OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception"})
SWITCHES = ("enable_thinking", "clear_thinking")
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of reasoning effort that clients know, least first; besides them `none` is no reasoning at all."""
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `in_reasoning`: the prompt ends inside an open `<think>`, so the answer starts with reasoning."""

    text: str
    ids: tuple[int, ...]
    in_reasoning: bool


class ChatTemplate:
    """The chat template of a checkpoint.

    `enable_thinking`, `reasoning_effort` and whatever else the template reads are given to `render` by name; a name that the
    template does not read is refused, with the nearest that it does.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, origin: str = TEMPLATE_FILE) -> None:
        """Compiles the template `source`; `origin` names it in messages.

        Raises:
            ChatError: the template has a syntax error.
        """
        self._tokenizer = tokenizer
        self.origin = origin
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source, {"raise_exception": _raise_exception})
        except jinja2.TemplateError as error:
            raise ChatError(f"{origin}: the chat template cannot be compiled: {error}") from error
        self.arguments = frozenset(used - OWN_VARIABLES - set(environment.globals))

    @classmethod
    def open(cls, files: TextFiles, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a checkpoint: `chat_template.jinja` wins over the one in `tokenizer_config.json`.

        Raises:
            ChatError: there is none, or it cannot be compiled.
            TokenizerError: `tokenizer_config.json` is damaged.
        """
        source = files.text(TEMPLATE_FILE)
        if source is not None:
            return cls(source, tokenizer, f"{files.label}/{TEMPLATE_FILE}")
        declared: Any = json_object(files, CONFIG_FILE).get("chat_template")
        if isinstance(declared, list):
            named = (cast(dict[str, Any], entry) for entry in cast(list[Any], declared) if isinstance(entry, dict))
            declared = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
        if not isinstance(declared, str):
            raise ChatError(
                f"{files.label}/{TEMPLATE_FILE}: no such file: without a chat template this checkpoint completes text, "
                "but cannot chat"
            )
        return cls(declared, tokenizer, f"{files.label}/{CONFIG_FILE}")

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, /, **arguments: Any
    ) -> ChatPrompt:
        """Renders a conversation up to the point where the assistant speaks.

        Args:
            messages: OpenAI-style messages: `role`, `content` (a string or text parts), `reasoning_content`, `tool_calls`; or
                with Anthropic's content parts (see `normal_messages`).
            tools: OpenAI-style tool definitions.
            arguments: what the template reads, such as `enable_thinking=False` or `reasoning_effort="high"`.

        Raises:
            ChatError: a message, tool or argument is not acceptable, or the template refuses the conversation.
        """
        self._check_arguments(arguments)
        if not messages:
            raise ChatError("messages: at least one message is needed")
        try:
            text = self._text(messages, tools, arguments)
        except RecursionError as error:
            raise ChatError("messages: the conversation or its tools are nested too deeply") from error
        ids = self._tokenizer.encode_template(text)
        return ChatPrompt(text.replace(GUARD, ""), tuple(ids), self._ends_in_reasoning(ids))

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, arguments: Mapping[str, Any]
    ) -> str:
        """The rendered conversation, guards still in it."""
        values = {
            "messages": [self._guarded(message) for message in normal_messages(messages)],
            "tools": [self._guarded(tool) for tool in tools] if tools else None,
            **{name: self._guarded(value) for name, value in arguments.items()},
        }
        try:
            return self._template.render(**self._tokenizer.names, **values, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ChatError(f"{self.origin}: the chat template refused the conversation: {error}") from error

    @property
    def can_skip_reasoning(self) -> bool:
        """Whether the template has a switch for reasoning (GLM-5.3's has none)."""
        return "enable_thinking" in self.arguments

    @cached_property
    def efforts(self) -> tuple[str, ...]:
        """The levels of `reasoning_effort` that the template makes a difference for: those that it writes into the prompt.

        GLM-5.2 knows high and max, and takes every other word for max; GLM-5.3 knows low, high and max.
        """
        if "reasoning_effort" not in self.arguments:
            return ()
        return tuple(level for level in EFFORTS if self._writes_effort(level))

    def effort(self, level: str) -> dict[str, Any]:
        """The template arguments for a client's reasoning effort: the lowest level that the template knows and that is not below
        `level`, or its highest; for `none`, no reasoning.

        Raises:
            ChatError: there is no such level, or the template has no switch for what is asked.
        """
        if level == "none" and self.can_skip_reasoning:
            return {"enable_thinking": False}
        known = ", ".join((*(["none"] if self.can_skip_reasoning else []), *self.efforts)) or "no reasoning effort"
        if level not in EFFORTS:
            raise ChatError(f"reasoning_effort: cannot be {level!r:.80}; this model's chat template knows {known}")
        if not self.efforts:
            raise ChatError(f"reasoning_effort: this model's chat template knows {known}, got {level!r}")
        enough = [name for name in self.efforts if EFFORTS.index(name) >= EFFORTS.index(level)]
        return {"reasoning_effort": (enough or self.efforts[-1:])[0]}

    def _writes_effort(self, level: str) -> bool:
        """Whether the template, given a level, writes that one."""
        text = self.render([{"role": "user", "content": ""}], reasoning_effort=level).text
        written = re.search(r"Reasoning Effort: *(\w+)", text, re.IGNORECASE)
        return written is not None and written[1].lower() == level

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if name not in self.arguments:
                # A switch of other GLM templates is no slip of the pen.
                wanted = () if name in SWITCHES else self.arguments
                near = sorted(difflib.get_close_matches(name, wanted, n=2, cutoff=0.5))
                known = ", ".join(sorted(self.arguments)) or "none"
                hint = f"; did you mean {' or '.join(near)}?" if near else f"; it reads {known}"
                raise ChatError(f"{name}: the chat template reads no such argument{hint}")
            if name in SWITCHES and not isinstance(value, bool):
                raise ChatError(f"{name}: must be true or false, got {value!r:.80}")
            if name == "reasoning_effort" and not isinstance(value, str):
                raise ChatError(f"{name}: must be a string, got {value!r:.80}")

    def _guarded(self, value: Any) -> Any:
        """The same value with every string in it, keys included, guarded against becoming control tokens."""
        if isinstance(value, str):
            return self._tokenizer.guard(value)
        if isinstance(value, Mapping):
            items = cast(Mapping[Any, Any], value).items()
            return {self._guarded(key): self._guarded(inner) for key, inner in items}
        if isinstance(value, list | tuple):
            return [self._guarded(inner) for inner in cast(Sequence[Any], value)]
        return value

    def _ends_in_reasoning(self, ids: Sequence[int]) -> bool:
        for index in reversed(ids):
            text = self._tokenizer.control_text(index)
            if text is not None:
                return text == "<think>"
        return False


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`tojson` as chat templates expect it: no HTML escapes, non-ASCII kept. Guards stay guards."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(GUARD).strip('"'), GUARD)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
