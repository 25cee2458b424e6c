"""The structure of answers: the same events however tokens are cut, nothing lost, nothing taken back, arguments as declared."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.server.answer.events import (
    AnswerMessage,
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from legato.server.answer.structure import Answer
from legato.server.text.chat_template import ChatTemplate
from legato.server.text.tokenizer import Tokenizer
from legato.server.tools.definitions import Tools
from legato.types import FinishReason
from tests.tiny_text import TAGS

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "number"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/place"},
            "note": {"type": ["string", "null"]},
            "level": {"enum": ["low", "high"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    },
}
TOOLS = Tools.from_openai(
    [{"type": "function", "function": tool} for tool in (WEATHER, {"name": "now"}, {"name": "run", "parameters": {}})]
)
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value></tool_call>"


class Heard:
    """Everything that came out of an answer, with call ids as their numbers, since those are drawn at random."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.count = 0
        self.stop: str | None = None
        self.message = AnswerMessage("", "", ())
        self.reasoning_tokens = 0
        self.ids: list[str] = []

    def key(self) -> tuple[Any, ...]:
        calls = tuple((call.name, call.arguments, call.is_complete) for call in self.message.calls)
        texts = (self.message.reasoning, self.message.content)
        return (tuple(self.events), self.count, self.stop, texts, calls, self.reasoning_tokens)


def hear(
    tokenizer: Tokenizer,
    steps: Sequence[Sequence[int]],
    *,
    in_reasoning: bool = True,
    tools: Tools | None = TOOLS,
    stop: Sequence[str] = (),
    reason: FinishReason = "stop",
) -> Heard:
    answer, heard = Answer(tokenizer, in_reasoning=in_reasoning, tools=tools, stop=stop), Heard()
    outcomes = [answer.push(step) for step in steps]
    for step in (*outcomes, answer.finish(reason)):
        heard.count += step.num_tokens
        heard.stop = heard.stop or step.stop
        for before, after in itertools.pairwise(step.events):
            assert merged(before, after) is None, "events of one step that belong together come as one"
        for event in step.events:
            if isinstance(event, ToolCallStart):
                heard.ids.append(event.id)
                event = ToolCallStart(event.index, f"id {event.index}", event.name)
            joined = merged(heard.events[-1], event) if heard.events else None
            heard.events[-1:] = [joined] if joined else [*heard.events[-1:], event]
    heard.message, heard.reasoning_tokens = answer.message, answer.reasoning_tokens
    check(heard)
    return heard


def merged(before: Event, after: Event) -> Event | None:
    """Two neighbours as one event, if they are pieces of the same text."""
    match before, after:
        case ReasoningText(), ReasoningText():
            return ReasoningText(before.text + after.text)
        case ContentText(), ContentText():
            return ContentText(before.text + after.text)
        case ToolCallArguments(), ToolCallArguments() if before.index == after.index:
            return ToolCallArguments(before.index, before.text + after.text)
        case _:
            return None


def check(heard: Heard) -> None:
    """What holds for every answer: events tell the same as the message, and calls come one after the other, with valid JSON."""
    pieces: dict[type, str] = {ReasoningText: "", ContentText: ""}
    arguments: dict[int, str] = {}
    ended: list[int] = []
    for event in heard.events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(arguments) == len(ended)
            arguments[event.index] = ""
        elif isinstance(event, ToolCallArguments):
            assert event.text and event.index not in ended
            arguments[event.index] += event.text
        elif isinstance(event, ToolCallEnd):
            ended.append(event.index)
        else:
            assert event.text
            pieces[type(event)] += event.text
    assert ended == list(arguments)
    assert (pieces[ReasoningText], pieces[ContentText]) == (heard.message.reasoning, heard.message.content)
    assert list(arguments.values()) == [call.arguments for call in heard.message.calls]
    for call in heard.message.calls:
        if call.is_complete:
            assert isinstance(strict_json(call.arguments), dict)
    assert all(heard.ids) and len(set(heard.ids)) == len(heard.ids) == len(heard.message.calls)


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse, parse_int=str)


def by_width(ids: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Steps of 1 to 8 tokens, beginning at every place, and every cut in two."""
    for width in range(1, 9):
        for first in range(width):
            yield [ids[:first], *(ids[at : at + width] for at in range(first, len(ids), width))]
    for at in range(len(ids) + 1):
        yield [ids[:at], ids[at:]]


@pytest.fixture(scope="module")
def spelled(description: dict[str, Any]) -> Tokenizer:
    """A tokenizer without control tokens for the structure of answers."""
    added = [token for token in description["added_tokens"] if token["content"] not in TAGS]
    return Tokenizer({**description, "added_tokens": added})


@pytest.fixture(scope="module")
def half(description: dict[str, Any]) -> Tokenizer:
    """One that has some of them."""
    gone = ("</think>", "<tool_call>", "</arg_value>")
    return Tokenizer(
        {**description, "added_tokens": [t for t in description["added_tokens"] if t["content"] not in gone]}
    )


TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"text": "Hm, 你好.</think>Yes: 3 < 4 & a <tool b."},
    "no reasoning": {"text": "Yes.", "in_reasoning": False},
    "call": {"text": f"I ask.</think>{CALL}"},
    "text, calls, newlines": {
        "text": "</think>I ask.\n\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New\nYork</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["a", {"b": null}]</arg_value>\n</tool_call>\n<tool_call>now</tool_call>\n'
        f"{CALL}<tool_call>unknown<arg_key>k</arg_key><arg_value>01</arg_value></tool_call>\n"
    },
    "nothing thought": {"text": f"</think>{CALL}"},
    "call inside reasoning": {"text": f"I ask: {CALL}"},
    "all of it in reasoning": {"text": "The answer is 42."},
    "cut in reasoning": {"text": "The answer is 4", "reason": "length"},
    "cut in a string": {"text": f"</think>{CALL[:-30]}", "reason": "length"},
    "cut in an object": {
        "text": '</think><tool_call>weather<arg_key>place</arg_key><arg_value>{"x": 1',
        "reason": "length",
    },
    "cut in a key": {"text": f"</think>Hm.{CALL[:-46]}", "reason": "length"},
    "cut behind a key": {
        "text": f"</think>{CALL}<tool_call>weather<arg_key>city</arg_key> <arg_value>B</arg_value> x <arg_key>days</arg_key>",
        "reason": "length",
    },
    "cut in a name": {"text": "</think><tool_call>wea", "reason": "length"},
    "stop string": {"text": "a END b</think>c END d", "stop": ("END", "d")},
    "stop string before a call": {"text": f"</think>c EN{CALL}D", "stop": ("END",)},
    "stop tag": {"text": "a</think>b", "stop": ("</think>",)},
    "no calls": {"text": f"</think>Like {CALL}!", "tools": None},
    "malformed": {
        "text": '</think>x<tool_call>{"name": 1}</tool_call>y<tool_call>now<tool_call></tool_call></arg_value>'
        "<tool_call>weather z<arg_key>a</arg_key></tool_call>"
    },
    "sloppy": {
        "text": "</think><tool_call>weather<arg_key>city<arg_value>B</arg_key></tool_call>stray<tool_call>now junk "
        "<tool_call>now<arg_key>a</arg_key> b c <arg_key>d<tool_call>run<arg_value>e</arg_value></tool_call>"
    },
    "several reasonings": {"text": "a<think>b</think>c<think>d</think>e</think>f"},
    "nullable": {
        "text": "</think>"
        + "".join(
            f"<tool_call>weather<arg_key>note</arg_key><arg_value>{note}</arg_value></tool_call>"
            for note in ("null", "nul", "nullable", "")
        )
    },
}


@pytest.mark.parametrize("which", ["tokenizer", "spelled", "half"])
@pytest.mark.parametrize("name", TEXTS)
def test_every_cut_gives_the_same_events(name: str, which: str, request: pytest.FixtureRequest) -> None:
    chosen: Tokenizer = request.getfixturevalue(which)
    case = dict(TEXTS[name])
    ids = chosen.encode_template(case.pop("text"))
    expected = hear(chosen, [[index] for index in ids], **case).key()
    for steps in by_width(ids):
        assert hear(chosen, steps, **case).key() == expected


@pytest.mark.parametrize("name", TEXTS)
def test_spelled_out_tags_mean_the_same(name: str, tokenizer: Tokenizer, spelled: Tokenizer) -> None:
    """A tokenizer without these control tokens gives the same answer, at whatever character its tokens are cut."""
    case = dict(TEXTS[name])
    text = case.pop("text")
    expected = hear(tokenizer, [tokenizer.encode_template(text)], **case)
    for at in range(0, len(text), 1 if len(text) < 150 else 3):
        heard = hear(spelled, [spelled.encode(text[:at]), spelled.encode(text[at:])], **case)
        assert (heard.events, heard.stop) == (expected.events, expected.stop)


FRAGMENTS = (
    *TAGS[:8],
    "weather",
    "now",
    "city",
    "days",
    "null",
    "[1, 2]",
    '{"x": "',
    "a b",
    " ",
    "\n",
    "ü",
    "END",
    "<",
    "7",
)


def without_cut_key(fragments: list[str]) -> list[str]:
    """What comes before the last key, if no value began behind it."""
    last = max((at for at, fragment in enumerate(fragments) if fragment == "<arg_key>"), default=len(fragments))
    return fragments if "<arg_value>" in fragments[last:] else fragments[:last]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_answers(data: st.DataObject, tokenizer: Tokenizer) -> None:
    """Any sequence of tags and text: cut anyhow the same, complete calls are valid JSON, all text but a cut key is somewhere."""
    fragments = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=25))
    ids = [index for fragment in fragments for index in tokenizer.encode_template(fragment)]
    case: dict[str, Any] = {
        "in_reasoning": data.draw(st.booleans()),
        "tools": data.draw(st.sampled_from([TOOLS, None])),
        "stop": data.draw(st.sampled_from([(), ("END",), ("a b", "</tool_call>")])),
        "reason": data.draw(st.sampled_from(["stop", "length"])),
    }
    expected = hear(tokenizer, [[index] for index in ids], **case)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=6)))
    steps = [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]
    assert hear(tokenizer, steps, **case).key() == expected.key()
    if case["reason"] == "stop":
        assert all(call.is_complete for call in expected.message.calls)
    if expected.stop is None:
        message = expected.message
        if message.calls and not message.calls[-1].is_complete:
            fragments = without_cut_key(fragments)
        told = message.reasoning + message.content + "".join(f"{call.name} {call.arguments}" for call in message.calls)
        for word in ("weather", "now", "city", "days", "ü", "END", "7"):
            assert told.count(word) >= fragments.count(word)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_the_template_writes_is_read_back(
    data: st.DataObject, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    """An assistant's turn, written by the chat template into a prompt and read as an answer, is the same turn."""
    values: dict[str, st.SearchStrategy[Any]] = {
        "city": st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=12),
        "days": st.integers(-(2**70), 2**70),
        "wind": st.floats(allow_nan=False, allow_infinity=False),
        "exact": st.booleans(),
        "tags": st.lists(st.text(st.characters(codec="utf-8"), max_size=4), max_size=3),
        "place": st.dictionaries(st.text("xyz", max_size=2), st.integers() | st.none(), max_size=3),
        "level": st.sampled_from(["low", "high"]),
        "undeclared": st.integers() | st.lists(st.booleans(), max_size=2) | st.just("plain text"),
    }
    calls = data.draw(st.lists(st.fixed_dictionaries({}, optional=values), max_size=3))
    words = st.text("ab .{}\n", max_size=8).map(str.strip)
    reasoning, content = data.draw(words), data.draw(words)
    turn = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": "weather", "arguments": arguments}} for arguments in calls],
    }
    user = {"role": "user", "content": "?"}
    before, after = (template.render(some).ids for some in ([user], [user, turn]))
    closing = len(tokenizer.encode_template("<|assistant|><think>"))
    heard = hear(tokenizer, [after[len(before) : len(after) - closing]])
    assert (heard.message.reasoning, heard.message.content) == (reasoning, content)
    assert [(call.name, json.loads(call.arguments)) for call in heard.message.calls] == [("weather", c) for c in calls]


def arguments_of(tokenizer: Tokenizer, key: str, value: str, tool: str = "weather") -> str:
    text = f"</think><tool_call>{tool}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    (call,) = hear(tokenizer, [tokenizer.encode_template(text)]).message.calls
    assert call.arguments.startswith(f'{{"{key}": ')
    return call.arguments[len(f'{{"{key}": ') : -1]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *(
            ("city", text, json.dumps(text, ensure_ascii=False))
            for text in ("123", "001", "true", "null", "  code\n", "")
        ),
        ("city", '""', r'"\"\""'),
        ("city", "a\n\tb\\ \x7f ü 你", '"a\\n\\tb\\\\ \x7f ü 你"'),
        ("level", "7", '"7"'),
        ("days", "5", "5"),
        ("days", " 5\n", "5"),
        ("days", "-0", "-0"),
        ("days", str(2**60), str(2**60)),
        ("days", "9" * 5000, "9" * 5000),
        ("days", "five", '"five"'),
        ("days", "01", '"01"'),
        ("wind", "1e3", "1e3"),
        ("wind", "1e999", "1e999"),
        ("wind", "NaN", '"NaN"'),
        ("wind", "-Infinity", '"-Infinity"'),
        ("wind", "0x10", '"0x10"'),
        ("exact", "true", "true"),
        ("exact", "True", "true"),
        ("exact", "yes", '"yes"'),
        ("tags", '["ü", 1.50]', '["ü", 1.50]'),
        ("tags", "[1, 2", '"[1, 2"'),
        ("tags", "[" * 20000, json.dumps("[" * 20000)),
        ("place", '\n{"x": 1}\n', '{"x": 1}'),
        ("place", "{'x': 1}", "\"{'x': 1}\""),
        ("note", "null", "null"),
        ("note", " null", '" null"'),
        ("note", "5", '"5"'),
        ("either", "5", "5"),
        ("either", "5 ", '"5 "'),
        ("either", "null", '"null"'),
        ("undeclared", "5", "5"),
        ("undeclared", "007", '"007"'),
        ("undeclared", "true", "true"),
        ("undeclared", '"x"', r'"\"x\""'),
        ("undeclared", "x y", '"x y"'),
    ],
)
def test_arguments_have_the_declared_type(key: str, value: str, expected: str, tokenizer: Tokenizer) -> None:
    assert arguments_of(tokenizer, key, value) == expected


def test_tools_without_a_schema_and_unknown_tools_follow_the_rule_for_undeclared_arguments(
    tokenizer: Tokenizer,
) -> None:
    for tool in ("now", "run", "unknown"):
        assert arguments_of(tokenizer, "n", "5", tool) == "5"
        assert arguments_of(tokenizer, "n", "five", tool) == '"five"'


def said(tokenizer: Tokenizer, text: str, **case: Any) -> AnswerMessage:
    return hear(tokenizer, [tokenizer.encode_template(text)], **case).message


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('a<tool_call>{"name": "now"}</tool_call>b', 'a<tool_call>{"name": "now"}</tool_call>b', []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("\n<tool_call>two words</tool_call>", "\n<tool_call>two words</tool_call>", []),
        (
            "<tool_call>now<arg_value>1</arg_value></tool_call>",
            "<tool_call>now<arg_value>1</arg_value></tool_call>",
            [],
        ),
        ("<tool_call>now<tool_call>run</tool_call>", "<tool_call>now", ["run {}"]),
        ("<tool_call>now", "<tool_call>now", []),
        ("<tool_call>now</think>", "<tool_call>now", []),
        ("</tool_call>", "</tool_call>", []),
        ("<tool_call>now<arg_key>a</arg_key></tool_call>", "<arg_key>a</arg_key>", ["now {}"]),
        ("<tool_call>now<arg_key>a</tool_call>", "<arg_key>a", ["now {}"]),
        ("<tool_call>now<arg_key>a<arg_value>1</arg_value></tool_call>", "", ['now {"a": 1}']),
        ("<tool_call>now<arg_key>a</arg_key><arg_value>x</tool_call>b", "b", ['now {"a": "x"}']),
        ("<tool_call>now<arg_key>a</arg_key><arg_value><think></arg_value></tool_call>", "", ['now {"a": "<think>"}']),
        (
            "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value> lost <tool_call>run</tool_call>",
            "lost",
            ['now {"a": 1}', "run {}"],
        ),
        ("<tool_call>now<arg_key>a</arg_key><arg_value>x y", "", ['now {"a": "x y"}']),
        ("<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value>", "", ['now {"a": 1}']),
    ],
)
def test_calls_that_are_not_well_formed(text: str, content: str, calls: list[str], tokenizer: Tokenizer) -> None:
    """Before the name is complete they are content; afterwards the call stands and what fits nowhere is content behind it."""
    message = said(tokenizer, text, in_reasoning=False)
    assert message.content == content
    assert [f"{call.name} {call.arguments}" for call in message.calls] == calls


def test_a_call_that_is_cut_shows_it(tokenizer: Tokenizer) -> None:
    message = said(tokenizer, f"</think>{CALL}{CALL[:-28]}", reason="length")
    assert [call.is_complete for call in message.calls] == [True, False]
    assert message.calls[1].arguments == '{"city": "Zü' and message.content == ""
    for reason in ("length", "abort", "deadline"):
        assert said(tokenizer, "</think><tool_call>wea", reason=reason).content == "<tool_call>wea"
        for end in ("<arg_key>", "<arg_key>da", "<arg_key>days</arg_key>", "<arg_key>days</arg_key>\n"):
            message = said(tokenizer, f"</think>Hm.{CALL[:-12]}{end}", reason=reason)
            assert (message.content, [call.is_complete for call in message.calls]) == ("Hm.", [False]), end
            assert message.calls[0].arguments == '{"city": "Zürich"'


@pytest.mark.parametrize("width", [1, 2, 3, 5, 99])
def test_parallel_calls_in_one_step_or_many(width: int, tokenizer: Tokenizer) -> None:
    """The end of reasoning, whole calls and the end of the answer in one iteration, as long drafts bring them."""
    ids = tokenizer.encode_template(
        f"go</think>{CALL}<tool_call>now</tool_call>{CALL}<tool_call>odd</tool_call><|user|>"
    )
    heard = hear(tokenizer, [ids[at : at + width] for at in range(0, len(ids), width)])
    starts = [event for event in heard.events if isinstance(event, ToolCallStart)]
    assert [(start.index, start.name) for start in starts] == [(0, "weather"), (1, "now"), (2, "weather"), (3, "odd")]
    assert [call.arguments for call in heard.message.calls] == ['{"city": "Zürich"}', "{}", '{"city": "Zürich"}', "{}"]
    assert heard.message.content == ""


def test_one_call_is_all_where_parallel_calls_are_off(tokenizer: Tokenizer) -> None:
    tools = Tools.from_openai([{"type": "function", "function": WEATHER}], "auto", False)
    ids = tokenizer.encode_template(f"</think>Hm. {CALL}")
    for steps in by_width([*ids, *tokenizer.encode_template(CALL)]):
        heard = hear(tokenizer, steps, tools=tools)
        assert (heard.count, heard.stop, len(heard.message.calls)) == (len(ids), "</tool_call>", 1)


def test_where_no_call_may_be_made_calls_are_text(tokenizer: Tokenizer) -> None:
    none = Tools.from_openai([{"type": "function", "function": WEATHER}], "none")
    for tools in (None, none):
        message = said(tokenizer, f"a {CALL}</think>b {CALL}", tools=tools)
        assert message == AnswerMessage(f"a {CALL}", f"b {CALL}", ())


def test_text_that_looks_like_a_tag_is_text(tokenizer: Tokenizer) -> None:
    """Only control tokens are structure; and what could have become a spelled-out tag is told once, in order."""
    source = "if a </think> b: x <tool_call> y </tool_call <"
    ids = tokenizer.encode(source)
    assert hear(tokenizer, [[index] for index in ids], in_reasoning=False).message == AnswerMessage("", source, ())


def test_an_answer_that_never_left_reasoning_is_an_answer(tokenizer: Tokenizer) -> None:
    text = "The answer is 42."
    assert said(tokenizer, text) == AnswerMessage(text, text, ())
    assert said(tokenizer, text, reason="length") == AnswerMessage(text, "", ())
    assert said(tokenizer, f"{text}</think>") == AnswerMessage(text, "", ())
    assert said(tokenizer, f"{text}{CALL}").content == ""
    cut = said(tokenizer, text, stop=("42",))
    assert cut == AnswerMessage(text, "The answer is ", ())


@pytest.mark.parametrize("stop", ["END", "\n\n", "x", "<", "a</think>"])
def test_stop_strings_are_looked_for_in_content_alone(stop: str, tokenizer: Tokenizer) -> None:
    body = stop if "think" not in stop else "a"
    text = f"r {body} r</think>"
    call = f"<tool_call>weather<arg_key>city</arg_key><arg_value>c {body} c</arg_value></tool_call>"
    message = said(tokenizer, f"{text}say{call}{call}", stop=(stop,))
    assert (message.reasoning, message.content, len(message.calls)) == (f"r {body} r", "say", 2)
    heard = hear(tokenizer, [tokenizer.encode_template(f"{text}say {body} more")], stop=(stop,))
    assert heard.message.content == ("say a more" if "think" in stop else "say ")
    # No match goes across the end of the reasoning or across a call.
    half, rest = stop[: len(stop) // 2], stop[len(stop) // 2 :]
    if half and "think" not in stop:
        crossing = said(tokenizer, f"{half}</think>{rest}w{half}{call}{rest}w", stop=(stop,))
        assert crossing.content == f"{rest}w{half}{rest.lstrip()}w" or crossing.content == f"{rest}w{half}{rest}w"


@pytest.mark.parametrize("which", ["tokenizer", "spelled"])
@pytest.mark.parametrize(
    ("in_reasoning", "text", "reasoning", "content"),
    [
        (True, "hm</think>yes", "hm", "yes"),
        (True, "never ends", "never ends", ""),
        (True, "</think>", "", ""),
        (False, "just text", "", "just text"),
        (False, "<think>hm</think>yes", "hm", "yes"),
        (False, "a < b </think", "", "a < b </think"),
        (True, "a</thin</think>b<think>c</think>d", "a</thinc", "bd"),
        (False, "thinking is off</think>after all", "", "thinking is offafter all"),
    ],
)
def test_reasoning_and_content(
    in_reasoning: bool, text: str, reasoning: str, content: str, which: str, request: pytest.FixtureRequest
) -> None:
    chosen: Tokenizer = request.getfixturevalue(which)
    message = said(chosen, text, in_reasoning=in_reasoning, reason="length")
    assert message == AnswerMessage(reasoning, content, ())


def test_stop_tags(tokenizer: Tokenizer) -> None:
    assert said(tokenizer, "a</think>b", stop=("</think>",)) == AnswerMessage("a", "", ())
    heard = hear(tokenizer, [tokenizer.encode_template(f"a</think>b{CALL}c")], stop=("</tool_call>",))
    assert (heard.stop, heard.message.content, len(heard.message.calls)) == ("</tool_call>", "b", 1)
    heard = hear(tokenizer, [tokenizer.encode_template(f"a</think>b{CALL}c")], stop=("<tool_call>",))
    assert (heard.stop, heard.message.content, heard.message.calls) == ("<tool_call>", "b", ())


def test_tokens_behind_the_stop_do_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_template("a</think>b|c")
    answer = Answer(tokenizer, in_reasoning=True, stop=("|",))
    step = answer.push(ids)
    assert (step.num_tokens, step.stop) == (len(ids) - 1, "|")
    assert answer.push(ids) == answer.finish("stop") == type(step)((), 0)


def test_unfinished_characters(tokenizer: Tokenizer) -> None:
    token_of = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    party = [token_of[bytes([byte])] for byte in "🎉".encode()]
    end = tokenizer.control["</think>"]
    for steps in by_width([*party, *party[:2], end, *party]):
        assert hear(tokenizer, steps).message == AnswerMessage("🎉\ufffd", "🎉", ())
    answer = Answer(tokenizer, in_reasoning=False)
    assert [answer.push([index]).events for index in party] == [(), (), (), (ContentText("🎉"),)]


def test_phases_and_reasoning_tokens(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, in_reasoning=True, tools=TOOLS)
    ids = tokenizer.encode("one two three")
    answer.push(ids)
    assert (answer.phase, answer.reasoning_tokens) == ("reasoning", len(ids))
    answer.push([tokenizer.control["</think>"]])
    assert (answer.phase, answer.reasoning_tokens, answer.has_tool_calls) == ("content", len(ids), False)
    answer.push(tokenizer.encode_template("<tool_call>now"))
    assert (answer.phase, answer.has_tool_calls) == ("tool_call", False)
    answer.push(tokenizer.encode_template("</tool_call>"))
    assert (answer.phase, answer.has_tool_calls, answer.reasoning_tokens) == ("content", True, len(ids))


def test_arguments_stream_as_they_come(tokenizer: Tokenizer) -> None:
    """A long string is not held back, and every prefix of what has been told can still become a JSON object."""
    answer = Answer(tokenizer, in_reasoning=False, tools=TOOLS)
    answer.push(tokenizer.encode_template("<tool_call>weather<arg_key>city</arg_key><arg_value>"))
    for word in ("one ", 'two "', "three\n"):
        step = answer.push(tokenizer.encode(word))
        assert step.events == (ToolCallArguments(0, json.dumps(word)[1:-1]),)
    answer.push(tokenizer.encode_template("</arg_value><arg_key>note</arg_key><arg_value>"))
    assert answer.push(tokenizer.encode("nu")).events == ()
    assert "".join(event.text for event in answer.push(tokenizer.encode("mber")).events) == '"number'  # type: ignore[union-attr]
    assert re.fullmatch(r'\{"city": ".*", "note": "number', answer.message.calls[0].arguments)
