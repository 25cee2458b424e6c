"""Messages to a prompt: the checkpoint's own chat template, rendered so that only the template writes control tokens.

Owns the sandboxed template environment, the checks on messages and template arguments, and the guarding of user text. Knows
nothing of HTTP or the engine. `LLM.chat` and the command line call it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import jinja2
import jinja2.meta
import jinja2.sandbox

from legato.server.text import GUARD, TextFiles, Tokenizer, json_object

Message = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SAME_ROLE = {"developer": "system", "function": "tool"}
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception"})
SWITCHES = ("enable_thinking", "clear_thinking")
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


class ChatError(ValueError):
    """Messages or template arguments that cannot be rendered. The message says which and what is allowed."""


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
            named = cast(list[dict[str, Any]], declared)
            declared = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
        if not isinstance(declared, str):
            raise ChatError(
                f"{files.label}/{TEMPLATE_FILE}: no such file: without a chat template this checkpoint completes text, "
                "but cannot chat"
            )
        return cls(declared, tokenizer, f"{files.label}/{CONFIG_FILE}")

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **arguments: Any
    ) -> ChatPrompt:
        """Renders a conversation up to the point where the assistant speaks.

        Args:
            messages: OpenAI-style messages: `role`, `content` (a string or text parts), `reasoning_content`, `tool_calls`.
            tools: OpenAI-style tool definitions.
            arguments: what the template reads, such as `enable_thinking=False` or `reasoning_effort="high"`.

        Raises:
            ChatError: a message, tool or argument is not acceptable, or the template refuses the conversation.
        """
        self._check_arguments(arguments)
        if not messages:
            raise ChatError("messages: at least one message is needed")
        values = {
            "messages": [self._guarded(_normal(message, number)) for number, message in enumerate(messages)],
            "tools": [self._guarded(tool) for tool in tools] if tools else None,
            **{name: self._guarded(value) for name, value in arguments.items()},
        }
        try:
            text = self._template.render(**self._tokenizer.names, **values, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ChatError(f"{self.origin}: the chat template refused the conversation: {error}") from error
        ids = self._tokenizer.encode_template(text)
        return ChatPrompt(text.replace(GUARD, ""), tuple(ids), self._ends_in_reasoning(ids))

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if name not in self.arguments:
                near = sorted(difflib.get_close_matches(name, self.arguments, n=2, cutoff=0.5))
                known = ", ".join(sorted(self.arguments)) or "none"
                hint = f"; did you mean {' or '.join(near)}?" if near else f"; it reads {known}"
                raise ChatError(f"{name}: the chat template reads no such argument{hint}")
            if name in SWITCHES and not isinstance(value, bool):
                raise ChatError(f"{name}: must be true or false, got {value!r}")

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


def _normal(message: Message, number: int) -> dict[str, Any]:
    """A message in the one form that templates see: known role, content as one string, reasoning apart, arguments as objects.

    `<think>` in assistant content is taken apart here, since guarded text no longer shows it to the template.
    """
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise ChatError(f"{where}: must be an object with role and content, got {type(message).__name__}")
    normal = dict(message)
    role: Any = normal.get("role")
    role = normal["role"] = SAME_ROLE.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        raise ChatError(f"{where}.role: must be one of {', '.join(ROLES)}, got {role!r}")
    content = normal["content"] = _content(normal.get("content"), where)
    if role != "assistant":
        return normal
    if "reasoning" in normal:
        normal.setdefault("reasoning_content", normal.pop("reasoning"))
    if not isinstance(normal.get("reasoning_content"), str) and "</think>" in content:
        before, _, after = content.rpartition("</think>")
        normal["reasoning_content"] = before.split("</think>")[0].split("<think>")[-1].strip("\n")
        normal["content"] = after.lstrip("\n")
    if normal.get("tool_calls"):
        normal["tool_calls"] = [_tool_call(call, where) for call in normal["tool_calls"]]
    return normal


def _content(content: Any, where: str) -> str:
    """Content as one string; `None` (an assistant message with tool calls only) is the empty one."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise ChatError(f"{where}.content: must be a string or a list of text parts, got {type(content).__name__}")
    parts: list[str] = []
    for part in cast(Sequence[Any], content):
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and isinstance(text := cast(Message, part).get("text"), str):
            parts.append(text)
        else:
            kind = cast(Message, part).get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"{where}.content: only text parts are supported, got {kind!r}")
    return "".join(parts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ChatError(f"{where}.tool_calls: must hold objects, got {type(call).__name__}")
    normal = dict(cast(Message, call))
    function = dict(normal.get("function") or normal)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ChatError(f"{where}.tool_calls: arguments are not valid JSON: {error}") from error
    if not isinstance(arguments, Mapping | None):
        raise ChatError(f"{where}.tool_calls: arguments must be a JSON object, got {type(arguments).__name__}")
    return {**normal, "function": {**function, "arguments": dict(cast(Message, arguments or {}))}}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`tojson` as chat templates expect it: no HTML escapes, non-ASCII kept. Guards stay guards."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(GUARD).strip('"'), GUARD)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
