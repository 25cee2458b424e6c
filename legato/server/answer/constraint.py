"""What a request's answer must look like, as a grammar: the choice of tools, strict arguments and the response format together.

Owns the grammar of GLM's tool calls, and which part of the answer a grammar is about: reasoning is always free. Knows token ids
only by name. Called once per request by the HTTP dialects, after the prompt has been rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from llguidance import LLMatcher

from legato.server.answer.structure import END_THINK
from legato.server.text.tokenizer import Tokenizer
from legato.server.tools.argument_grammar import (
    ANY_ARGUMENTS,
    ANY_VALUE,
    TERMINALS,
    SchemaError,
    arguments_grammar,
    json_rule,
    regex_literal,
)
from legato.server.tools.call import CALL, CALL_TAGS, END_CALL, END_KEY, END_VALUE, KEY, VALUE
from legato.server.tools.definitions import Tool, Tools
from legato.server.tools.freeform import INPUT, TextGrammar
from legato.types import Grammar, ParameterError, SamplingParams

MAX_KEPT = 4096
"""Characters up to which a grammar's verdict is remembered."""


def constrained(
    params: SamplingParams,
    tokenizer: Tokenizer,
    *,
    in_reasoning: bool,
    tools: Tools | None = None,
    response_format: Any = None,
) -> SamplingParams:
    """`params` with everything that tools, the response format and the reasoning budget ask of the engine.

    With tools to choose from, a response format is for answers without a call; where a call is required it has no say.

    Args:
        in_reasoning: the prompt ends inside an open `<think>`: a grammar waits for the end of it, and only then does a reasoning
            budget mean anything.
        response_format: OpenAI's `text`, `json_object` and `json_schema` (nested as in chat completions or flat as in responses);
            also `{"type": "regex", "regex": ...}` and `{"type": "grammar", "grammar": ...}` (llguidance's Lark notation).

    Raises:
        ParameterError: a field is wrong, cannot be combined with another, or a schema cannot be enforced.
    """
    wanted = answer_format(response_format)
    if wanted is not None and params.constraint is not None:
        raise ParameterError("response_format", f"cannot be combined with {params.constraint.kind}: give one of them")
    asked = None if wanted is None else "response_format"
    wanted = wanted or params.constraint
    banned = params.bad_token_ids
    if tools is not None and not tools.may_call and CALL in tokenizer.control:
        banned = tuple(dict.fromkeys((*banned, tokenizer.control[CALL])))
    calls = None if tools is None else _calls(tools, has_format=wanted is not None)
    if calls is not None and tools is not None:
        asked = "tool_choice" if tools.choice == "required" else asked or "strict or allowed tools"
        wanted = _joined(tools, calls, wanted, tokenizer)
    if params.ignore_eos and asked is not None:
        raise ParameterError("ignore_eos", f"cannot be combined with {asked}: a grammar decides where the text may end")
    params = replace(params, bad_token_ids=banned)
    if not in_reasoning:
        return _with(replace(params, reasoning_budget=None, reasoning_end=None), wanted, params.grammar_after)
    end = tokenizer.control.get(END_THINK)
    if end is None and (wanted is not None or params.reasoning_budget is not None):
        name = "reasoning_budget" if wanted is None else wanted.kind
        raise ParameterError(name, f"needs a tokenizer with the token {END_THINK}: this answer starts with reasoning")
    if params.reasoning_budget is not None:
        params = replace(params, reasoning_end=end)
    return _with(params, wanted, end)


def answer_format(value: Any) -> Grammar | None:
    """The grammar of a `response_format`. Raises `ParameterError` naming the field."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ParameterError("response_format", f"must be an object with a type, got {value!r:.80}")
    fields = cast(Mapping[str, Any], value)
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "json_schema":
        path = "response_format.json_schema" if "json_schema" in fields else "response_format"
        inner: Any = fields.get("json_schema", fields)
        schema: Any = cast(Mapping[str, Any], inner).get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ParameterError(f"{path}.schema", f"must be a JSON schema (an object), got {schema!r:.80}")
        try:
            checked(json_rule(cast(Mapping[str, Any], schema)), f"{path}.schema")
        except SchemaError as error:
            raise ParameterError(f"{path}.schema", f"cannot be enforced: {error}") from error
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
    if kind in ("regex", "grammar"):
        text = fields.get(kind)
        if not isinstance(text, str):
            raise ParameterError(f"response_format.{kind}", f"must be text, got {text!r:.80}")
        return Grammar("regex" if kind == "regex" else "grammar", text)
    known = "text, json_object, json_schema, regex or grammar"
    raise ParameterError("response_format.type", f"must be {known}, got {kind!r:.80}")


def checked(rule: str, name: str, terminals: Sequence[str] = ()) -> None:
    """Refuses the right side of a grammar rule that cannot be compiled: `ParameterError` for the field `name`."""
    text = "\n".join((f"start: {rule}", *terminals, *TERMINALS))
    fault = _known_fault(text) if len(text) <= MAX_KEPT else _fault(text)
    if fault:
        raise ParameterError(name, f"cannot be enforced: {fault}")


def _fault(text: str) -> str:
    """Why a grammar cannot be compiled; empty where it can."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(text))
    return messages[0].splitlines()[0] if is_error else ""


@lru_cache(maxsize=4096)
def _known_fault(text: str) -> str:
    """The same, remembered: agents send the same tools with every request."""
    return _fault(text)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Rules for calls, and what an answer made of them looks like: `start` without a response format."""

    rules: tuple[str, ...]
    start: str
    alternative: str


def _calls(tools: Tools, *, has_format: bool) -> _Calls | None:
    """The grammar of tool calls; `None` where the model is free to call what and how it likes."""
    callable_tools = [(number, tool) for number, tool in enumerate(tools.every) if tool.name in tools.allowed]
    is_free = len(callable_tools) == len(tools.every) and not any(tool.strict for _, tool in callable_tools)
    if tools.choice == "none" or (tools.choice == "auto" and is_free and not has_format):
        return None
    rules: list[str] = []
    names: dict[str, str] = {}
    for number, tool in callable_tools:
        arguments = ANY_ARGUMENTS
        if tool.strict or tools.choice == "required":
            arguments = _arguments(tool, number, rules, names)
        rules.append(f"call_{number}: {CALL} {json.dumps(tool.name)} {arguments} {END_CALL}")
    rules.append("call: " + " | ".join(f"call_{number}" for number, _ in callable_tools))
    several = "call+" if tools.parallel else "call"
    if tools.choice == "required":
        return _Calls(tuple(rules), several, "")
    return _Calls(tuple(rules), "TEXT? (call TEXT?)*" if tools.parallel else "TEXT? call?", several)


def _arguments(tool: Tool, number: int, rules: list[str], names: dict[str, str]) -> str:
    """Adds the rules of a tool's arguments and returns what stands for them in a call. `names`: of values by their right sides:
    arguments of many tools are of few kinds, and each kind is compiled once.

    What cannot be put into a grammar is refused for a strict tool, and free for others: only `strict` promises the schema.
    """
    path = f"tools[{number}].function.parameters"
    if tool.text_grammar is not None:
        return _text(tool.text_grammar, number, rules)
    try:
        grammar = arguments_grammar(tool.parameters, f"t{number}")
    except SchemaError as error:
        if tool.strict:
            raise ParameterError(path, f"cannot be enforced: {error}") from error
        return ANY_ARGUMENTS
    if grammar is None:
        if tool.strict:
            raise ParameterError(path, "cannot be enforced: with strict, it must list the arguments as properties")
        return ANY_ARGUMENTS
    for value in grammar.values:
        if value.rule in names:
            rules.append(f"{value.name}: {names[value.rule]}")
            continue
        try:
            checked(value.rule, f"{path}.properties.{value.argument}", value.terminals)
            rules += [f"{value.name}: {value.rule}", *value.terminals]
            names[value.rule] = value.name
        except ParameterError:
            if tool.strict:
                raise
            rules.append(f"{value.name}: {ANY_VALUE}")
    rules.append(f"t{number}: {grammar.sequence}")
    return f"t{number}"


def _text(grammar: TextGrammar, number: int, rules: list[str]) -> str:
    """Adds the rules of a free-form tool's text and returns what stands for them in a call."""
    path = f"tools[{number}].custom.format.grammar.definition"
    if grammar.syntax == "lark":
        if fault := _known_fault(grammar.definition):
            raise ParameterError(path, f"cannot be enforced: {fault}")
        rule = f"%lark {{\n{grammar.definition}\n}}"
    else:
        try:
            rule = regex_literal(grammar.definition)
        except SchemaError as error:
            raise ParameterError(path, str(error)) from error
    checked(rule, path)
    rules += [f"t{number}_0: {rule}", f"t{number}: {KEY} {json.dumps(INPUT)} {END_KEY} {VALUE} t{number}_0 {END_VALUE}"]
    return f"t{number}"


def _joined(tools: Tools, calls: _Calls, wanted: Grammar | None, tokenizer: Tokenizer) -> Grammar:
    """One grammar for calls and, where both are possible, answers in the wanted format."""
    missing = [tag for tag in CALL_TAGS if tag not in tokenizer.control]
    if missing:
        raise ParameterError("tool_choice", f"needs a tokenizer with the token {missing[0]}; this one can serve 'auto'")
    start, terminals = calls.start, TERMINALS
    if wanted is not None and calls.alternative:
        if wanted.kind == "grammar":
            raise ParameterError("grammar", "cannot be combined with tools: give tool_choice 'none', or another format")
        if wanted.kind == "json_schema":
            start = f"{calls.alternative} | {json_rule(json.loads(wanted.text))}"
        else:
            try:
                answer = regex_literal(wanted.text)
            except SchemaError as error:
                raise ParameterError(wanted.kind, str(error)) from error
            start, terminals = f"{calls.alternative} | ANSWER", (*TERMINALS, f"ANSWER: {answer}")
    return Grammar("grammar", "\n".join((f"start: {start}", *calls.rules, *terminals)))


def _with(params: SamplingParams, grammar: Grammar | None, after: int | None) -> SamplingParams:
    if grammar is None:
        return params
    texts: dict[str, Any] = {"json_schema": None, "regex": None, "grammar": None} | {grammar.kind: grammar.text}
    return replace(params, **texts, grammar_after=after)
