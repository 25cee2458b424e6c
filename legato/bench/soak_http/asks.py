"""What the clients of the soak ask: requests of every kind without end, drawn from a seed, and how the reply to each is judged.

Owns the mixture. Knows no connection and no clock. Called by `legato.bench.soak_http.clients`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from legato.bench.soak_http.replies import Api, Choice

Conduct = Literal["reads", "dawdles", "leaves", "walks off", "aborts"]
"""What the client does: reads to the end; reads slowly; closes the connection after some chunks; closes it before anything has
come; has the request aborted by its id, and reads what that gives."""
Judge = Callable[[Choice], str | None]
"""What is wrong with a choice, in words."""
CONTEXT, MAX_BODY_MIB = 1536, 1
"""What the server must have been started with: the longest prompt below and `LONG` fit, and the bad requests do not."""
LONG = 400
"""Tokens of a reply that nobody means to wait for."""
COLOURS = ("red", "green", "blue")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "colour": {"enum": list(COLOURS)},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "colour", "ok"],
    "additionalProperties": False,
}
REGEX: dict[str, Any] = {"response_format": {"type": "regex", "regex": "(ab|cd)+ ?"}}
TOOLS = ("paint", "mix")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and what must come of it.

    Attributes:
        kind: a word for the books.
        path, body: what is posted.
        api: how to read the reply; `None`: a refusal with `status` is due.
        max_tokens: most that a choice may have.
        num_prompt: tokens of the prompt, where the client knows them.
    """

    kind: str
    path: str
    body: bytes
    api: Api | None
    is_stream: bool = False
    conduct: Conduct = "reads"
    status: int = 200
    num_choices: int = 1
    max_tokens: int = 0
    num_prompt: int | None = None
    judge: Judge | None = None


class Asks:
    """Asks without end.

    Args:
        texts: what prompts are cut from.
        seed: of the draw.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        self._draw, self._text = random.Random(seed), "\n".join(texts)
        self._bad = _bad_requests()
        self._kinds: dict[str, tuple[float, Callable[[bool], Ask]]] = {
            "chat": (5, self._chat),
            "several": (0.5, self._several),
            "tools": (1.5, self._tools),
            "schema": (1.5, self._schema),
            "messages": (2, self._messages),
            "responses": (2, self._responses),
            "completions": (2, self._completions),
            "sentinel": (1, self._sentinel),
            "deadline": (0.5, self._deadline),
            "aborts": (0.5, self._aborts),
            "leaves": (1.5, self._leaves),
            "walks off": (1, self._walks_off),
            "bad": (2, lambda _: self._draw.choice(self._bad)),
        }

    def next(self, *, exact: bool) -> Ask:
        """The next one. `exact`: only what both sides can count to the token: nobody leaves, and nobody asks for several."""
        drawn = {
            kind: weight
            for kind, (weight, _) in self._kinds.items()
            if not (exact and kind in ("several", "leaves", "walks off"))
        }
        kind = self._draw.choices(list(drawn), list(drawn.values()))[0]
        return self._kinds[kind][1](self._draw.random() < 0.6)

    def _piece(self) -> str:
        """Some text, from a word to what fills half of a context."""
        length = self._draw.choice((4, 40, 120, 250, 600, 1400))
        first = self._draw.randrange(len(self._text) - length)
        return self._text[first : first + length]

    def _sampling(self) -> dict[str, Any]:
        draw = self._draw
        return draw.choice(
            ({}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"seed": draw.randrange(2**40)})
        )

    def _openai(self, kind: str, api: Api, fields: Mapping[str, Any], stream: bool, **more: Any) -> Ask:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        if options and self._draw.random() < 0.5:
            options["stream_options"]["continuous_usage_stats"] = True
        more.setdefault("conduct", "dawdles" if stream and self._draw.random() < 0.1 else "reads")
        body = json.dumps({**fields, **options}).encode()
        path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
        return Ask(kind, path, body, api, stream, max_tokens=fields["max_tokens"], **more)

    def _question(self) -> dict[str, Any]:
        """A conversation of one to five turns, some of them with a start that others have too."""
        draw = self._draw
        messages: list[dict[str, str]] = []
        if draw.random() < 0.4:
            messages.append({"role": "system", "content": self._text[: draw.choice((300, 900))]})
        for _ in range(draw.choice((0, 0, 1, 2))):
            messages += [
                {"role": "user", "content": self._piece()[:120]},
                {"role": "assistant", "content": self._piece()[:120]},
            ]
        messages.append({"role": "user", "content": self._piece()})
        max_tokens = draw.choice((1, 6, 24, 60, 120))
        return {"messages": messages, "max_tokens": max_tokens}

    def _chat(self, stream: bool) -> Ask:
        extra = self._draw.choice(
            (
                {}, {}, {"stop": ["\n\n", "return"]}, {"logprobs": True, "top_logprobs": 3}, {"repetition_penalty": 1.1},
                {"chat_template_kwargs": {"enable_thinking": False}}, {"thinking_token_budget": 8},
                {"presence_penalty": 0.5, "logit_bias": {"198": -5}}, {"priority": 1}, {"cache_salt": "salt"},
            )
        )  # fmt: skip
        return self._openai("chat", "chat", {**self._question(), **self._sampling(), **extra}, stream)

    def _several(self, stream: bool) -> Ask:
        fields = {**self._question(), "temperature": 0.9, "n": 3}
        return self._openai("several", "chat", fields, stream, num_choices=3)

    def _tools(self, stream: bool) -> Ask:
        choice = self._draw.choice(("required", "auto", {"type": "function", "function": {"name": TOOLS[0]}}))
        names = TOOLS if isinstance(choice, str) else TOOLS[:1]
        fields = {
            "messages": [{"role": "user", "content": self._piece()[:250]}],
            "max_tokens": 160,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in TOOLS
            ],
            "tool_choice": choice,
            "thinking_token_budget": 16,
        }
        judge = partial(_judge_calls, names, choice != "auto")
        return self._openai("tools", "chat", {**fields, **self._sampling()}, stream, judge=judge)

    def _schema(self, stream: bool) -> Ask:
        fields = {
            "messages": [{"role": "user", "content": self._piece()[:250]}],
            "max_tokens": 160,
            "response_format": {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}},
            "thinking_token_budget": 16,
        }
        return self._openai("schema", "chat", {**fields, **self._sampling()}, stream, judge=_judge_json)

    def _messages(self, stream: bool) -> Ask:
        draw = self._draw
        max_tokens = draw.choice((1, 8, 40, 100))
        body: dict[str, Any] = {
            "model": "any",
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": [{"type": "text", "text": self._piece()}]}],
            "stream": stream,
        }
        judge: Judge | None = None
        if draw.random() < 0.3:
            body |= {"tools": [{"name": name, "input_schema": SCHEMA} for name in TOOLS], "max_tokens": 160}
            body |= {"tool_choice": {"type": "any"}}
            judge = partial(_judge_calls, TOOLS, True)
        elif draw.random() < 0.5:
            body["thinking"] = {"type": "enabled", "budget_tokens": 16}
        return Ask("messages", "/v1/messages", json.dumps(body).encode(), "messages", stream,
                   max_tokens=body["max_tokens"], judge=judge)  # fmt: skip

    def _responses(self, stream: bool) -> Ask:
        max_tokens = self._draw.choice((1, 8, 40, 100))
        body: dict[str, Any] = {"input": self._piece(), "max_output_tokens": max_tokens, "stream": stream}
        judge: Judge | None = None
        if self._draw.random() < 0.3:
            body |= {"text": {"format": {"type": "json_schema", "name": "paint", "schema": SCHEMA}}}
            body |= {"max_output_tokens": 160, "reasoning": {"effort": "none"}}
            judge = _judge_json
        return Ask("responses", "/v1/responses", json.dumps(body).encode(), "responses", stream,
                   max_tokens=body["max_output_tokens"], judge=judge)  # fmt: skip

    def _completions(self, stream: bool) -> Ask:
        extra = self._draw.choice(({}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, REGEX))
        prompt = self._piece() if self._draw.random() < 0.5 else self._ids()
        fields = {"prompt": prompt, "max_tokens": self._draw.choice((1, 16, 60)), **extra, **self._sampling()}
        return self._openai("completions", "completions", fields, stream)

    def _sentinel(self, stream: bool) -> Ask:
        return self._openai("sentinel", "chat", sentinel(), stream)

    def _deadline(self, stream: bool) -> Ask:
        fields = {"prompt": self._ids(), "max_tokens": LONG, "ignore_eos": True, "timeout": self._draw.uniform(0.2, 3)}
        return self._openai("deadline", "completions", fields, stream)

    def _aborts(self, stream: bool) -> Ask:
        del stream
        fields = {**self._question(), "max_tokens": LONG, "ignore_eos": True}
        return self._openai("aborts", "chat", fields, True, conduct="aborts")

    def _leaves(self, stream: bool) -> Ask:
        del stream
        prompt = self._ids()
        fields = {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True}
        return self._openai("leaves", "completions", fields, True, conduct="leaves", num_prompt=len(prompt))

    def _walks_off(self, stream: bool) -> Ask:
        prompt = self._ids()
        fields = {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True}
        return self._openai("walks off", "completions", fields, stream, conduct="walks off", num_prompt=len(prompt))

    def _ids(self) -> list[int]:
        length = self._draw.choice((1, 20, 63, 64, 65, 200, 500))
        return [self._draw.randrange(1, 2000) for _ in range(length)]


def sentinel() -> dict[str, Any]:
    """The question that must get the same answer every time."""
    messages = [{"role": "user", "content": "Write a function that counts the words of a text."}]
    return {"messages": messages, "max_tokens": 48, "temperature": 0}


def _judge_json(choice: Choice) -> str | None:
    return None if choice.reason != "stop" else _misfit(choice.text)


def _judge_calls(names: Sequence[str], must_call: bool, choice: Choice) -> str | None:
    if must_call and choice.reason == "stop":
        return "no tool was called, though one had to be"
    if choice.reason != "tool_calls":
        return None
    for call in choice.calls:
        if call.name not in names:
            return f"a call of {call.name!r}, which was not offered"
        if (misfit := _misfit(call.arguments)) is not None:
            return misfit
    return None if choice.calls else "the reason is tool_calls, and there is none"


def _misfit(text: str) -> str | None:
    """Why a text does not fit `SCHEMA`, if so."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return f"not JSON: {text!r}"
    if not isinstance(value, dict) or set(cast("dict[str, Any]", value)) != {"n", "colour", "ok"}:
        return f"not the fields of the schema: {text!r}"
    fields = cast("dict[str, Any]", value)
    is_whole = isinstance(fields["n"], int) and not isinstance(fields["n"], bool) and 0 <= fields["n"] <= 999
    fits = is_whole and fields["colour"] in COLOURS and isinstance(fields["ok"], bool)
    return None if fits else f"not the values of the schema: {text!r}"


def _bad_requests() -> list[Ask]:
    """Requests that must be refused, each with its status."""
    say = [{"role": "user", "content": "x"}]
    chat, completions = "/v1/chat/completions", "/v1/completions"
    cases: list[tuple[str, Any, int]] = [
        (chat, b"{", 400),
        (chat, b"\xff\xfe", 400),
        (chat, b"[" * 50_000, 400),
        (chat, {"messages": []}, 400),
        (chat, {"messages": say, "temperature": "hot"}, 400),
        (chat, {"messages": say, "no_such_field": 1}, 400),
        (chat, {"messages": say, "model": "no such model"}, 404),
        (chat, {"messages": say, "max_tokens": 0}, 400),
        (chat, {"messages": say, "stop": ["x"] * 10_000}, 400),
        (chat, {"messages": say, "tools": [{"type": "function", "function": {"name": "no good name"}}]}, 400),
        (chat, {"messages": say, "stream": True, "logit_bias": {"1": 1000}}, 400),
        (completions, {"prompt": [10**9]}, 400),
        (completions, {"prompt": [1] * (CONTEXT + 1)}, 400),
        (completions, {"prompt": "x", "response_format": {"type": "regex", "regex": "("}}, 400),
        (completions, {"prompt": "x", "user": "x" * (MAX_BODY_MIB << 20)}, 413),
        ("/v1/messages", {"model": "any", "messages": say}, 400),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 400),
        ("/v1/no_such_route", {}, 404),
    ]
    return [
        Ask("bad", path, body if isinstance(body, bytes) else json.dumps(body).encode(), None, status=status)
        for path, body, status in cases
    ]
