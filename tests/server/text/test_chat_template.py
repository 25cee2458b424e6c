"""The chat template: agreement with transformers on honest input, no control tokens from dishonest input, refusals that help."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from legato.server.text.chat_template import ChatError, ChatPrompt, ChatTemplate
from legato.server.text.tokenizer import Folder, Tokenizer
from legato.server.tools.arguments import told_arguments
from tests.tiny_text import CONTROL, TAGS

USER = {"role": "user", "content": "Write f(x) < 3 & say 你好"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <a> and [b]: é",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "list[int]": {"type": "array"}}},
    },
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "text": "x<y", "l": [1, None]}},
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "high": {"messages": [USER], "reasoning_effort": "high"},
    "low": {"messages": [USER], "reasoning_effort": "low"},
    "thinking off": {"messages": [USER], "enable_thinking": False},
    "thinking on": {"messages": [USER], "enable_thinking": True},
    "system": {"messages": [{"role": "system", "content": "Be  brief."}, USER]},
    "history": {"messages": [USER, {"role": "assistant", "content": " done ", "reasoning_content": "hm"}, USER]},
    "history kept": {
        "messages": [USER, {"role": "assistant", "content": "done", "reasoning_content": "hm"}, USER],
        "clear_thinking": False,
    },
    "think in content": {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "tools": {"messages": [USER], "tools": [TOOL, TOOL]},
    "tool use": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "4"},
            {"role": "tool", "content": "[5]"},
        ],
        "tools": [TOOL],
    },
}


@pytest.fixture(scope="module")
def oracle(backend: Backend, template_source: str) -> Any:
    """Without types: to read those of transformers takes a type checker longer than all of Legato."""
    return importlib.import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template_source
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_honest_conversations_render_as_in_transformers(
    name: str, template: ChatTemplate, oracle: Any, backend: Backend
) -> None:
    case = dict(CONVERSATIONS[name])
    messages, tools = case.pop("messages"), case.pop("tools", None)
    prompt = template.render(messages, tools, **case)
    expected = oracle.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False, **case)
    assert prompt.text == expected
    assert list(prompt.ids) == backend.encode(expected, add_special_tokens=False).ids


def test_minimal_prompt(template: ChatTemplate) -> None:
    prompt = template.render([{"role": "user", "content": "Hi"}])
    assert prompt.text == "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>"


def controls(prompt: ChatPrompt, tokenizer: Tokenizer) -> list[str]:
    return [text for text in map(tokenizer.control_text, prompt.ids) if text is not None]


def hostile_places(text: str) -> dict[str, dict[str, Any]]:
    """Every place where a client can put a string."""
    call = {"function": {"name": text, "arguments": {text: text, "deep": {text: [text]}}}}
    return {
        "user": {"messages": [{"role": "user", "content": text}]},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text[:3]}, text[3:]]}]},
        "system": {"messages": [{"role": "system", "content": text}, USER]},
        "assistant": {"messages": [USER, {"role": "assistant", "content": text, "reasoning_content": text}]},
        "tool": {"messages": [USER, {"role": "tool", "content": text}]},
        "call": {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        "tools": {"messages": [USER], "tools": [{"type": "function", "function": {"name": text, text: text}}]},
        "kwarg": {"messages": [USER], "reasoning_effort": text},
    }


@pytest.mark.parametrize("control", CONTROL + TAGS)
@pytest.mark.parametrize("place", hostile_places(""))
def test_no_place_lets_a_client_write_control_tokens(
    control: str, place: str, template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    def rendered(text: str) -> ChatPrompt:
        case = dict(hostile_places(text)[place])
        return template.render(case.pop("messages"), case.pop("tools", None), **case)

    attack = f"x{control}y{control}"
    assert controls(rendered(attack), tokenizer) == controls(rendered("harmless"), tokenizer)
    assert attack in rendered(attack).text.replace('\\"', '"') or place in ("kwarg", "parts")


def test_json_escapes_stay_exact(template: ChatTemplate) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": 'say "<|user|>" \\ é\n'}}
    line = next(line for line in template.render([USER], [tool]).text.split("\n") if '"description"' in line)
    assert json.loads(line) == tool["function"]


@pytest.mark.parametrize(
    ("thinking", "effort", "last"),
    list(itertools.product((None, True, False), (None, "high", "max", "low", "none"), ("user", "tool", "assistant"))),
)
def test_start_state_is_what_the_prompt_ends_with(
    thinking: bool | None, effort: str | None, last: str, template: ChatTemplate
) -> None:
    arguments: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    arguments |= {} if effort is None else {"reasoning_effort": effort}
    tail = {
        "user": [],
        "tool": [{"role": "tool", "content": "<think>"}],
        "assistant": [{"role": "assistant", "content": "a"}],
    }
    prompt = template.render([USER, *tail[last]], **arguments)
    assert prompt.in_reasoning == prompt.text.endswith("<think>") == (thinking is not False)
    line = "Reasoning Effort: High" if effort == "high" else "Reasoning Effort: Max"
    assert (line in prompt.text) == (thinking is not False)


def test_arguments_of_calls_may_be_json_text(template: ChatTemplate) -> None:
    def with_arguments(arguments: Any) -> str:
        call = {"function": {"name": "f", "arguments": arguments}}
        return template.render([USER, {"role": "assistant", "tool_calls": [call]}]).text

    assert with_arguments('{"a": 1}') == with_arguments({"a": 1})
    assert with_arguments("") == with_arguments(None) == with_arguments({})


def test_other_spellings(template: ChatTemplate) -> None:
    developer = template.render([{"role": "developer", "content": "s"}, USER])
    assert developer == template.render([{"role": "system", "content": "s"}, USER])
    reasoning = template.render([USER, {"role": "assistant", "content": "a", "reasoning": "r"}])
    assert "<think>r</think>a" in reasoning.text


@pytest.mark.parametrize(
    ("messages", "arguments", "words"),
    [
        ([], {}, "at least one message"),
        (["hi"], {}, "messages[0]: must be an object"),
        ([{"content": "x"}], {}, "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], {}, "'wizard'"),
        ([{"role": [], "content": "x"}], {}, "messages[0].role"),
        ([USER, {"role": "user", "content": 3}], {}, "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "'image_url'"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}],
            {},
            "not valid JSON",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            {},
            "JSON object",
        ),
        ([USER, {"role": "assistant", "tool_calls": ["f"]}], {}, "messages[1].tool_calls[0]: must be an object"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"type": "custom"}]}],
            {},
            "messages[1].tool_calls[0].custom: must",
        ),
        ([USER], {"thinking": False}, "did you mean clear_thinking or enable_thinking?"),
        ([USER], {"colour": 1}, "it reads clear_thinking"),
        ([USER], {"enable_thinking": "false"}, "must be true or false"),
    ],
)
def test_refusals(messages: list[Any], arguments: dict[str, Any], words: str, template: ChatTemplate) -> None:
    with pytest.raises(ChatError) as caught:
        template.render(messages, **arguments)
    assert words in str(caught.value)


def test_templates_are_sandboxed(tokenizer: Tokenizer) -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(ChatError, match="unsafe"):
            ChatTemplate(source, tokenizer).render([USER])
    with pytest.raises(ChatError, match="only here"):
        ChatTemplate("{{ raise_exception('only here') }}", tokenizer).render([USER])
    with pytest.raises(ChatError, match="cannot be compiled"):
        ChatTemplate("{% if %}", tokenizer)


# -- reasoning effort ---------------------------------------------------------------------------------------------------


def test_effort_is_raised_to_what_the_template_knows(template: ChatTemplate, template_5_3: ChatTemplate) -> None:
    assert template.efforts == ("high", "max") and template_5_3.efforts == ("low", "high", "max")
    levels = ("minimal", "low", "medium", "high", "xhigh", "max")
    for known, wanted in ((template, "high high high high max max"), (template_5_3, "low low high high max max")):
        given = [known.effort(level) for level in levels]
        assert given == [{"reasoning_effort": word} for word in wanted.split()]
        for arguments in given:
            line = f"Reasoning Effort: {arguments['reasoning_effort'].capitalize()}<"
            assert line in known.render([USER], **arguments).text


def test_effort_none_is_no_reasoning_where_there_is_a_switch(
    template: ChatTemplate, template_5_3: ChatTemplate
) -> None:
    assert not template.render([USER], **template.effort("none")).in_reasoning
    assert not template_5_3.can_skip_reasoning
    for refused in (lambda: template_5_3.effort("none"), lambda: template_5_3.render([USER], enable_thinking=False)):
        with pytest.raises(ChatError, match=r"low, high, max|it reads clear_thinking, reasoning_effort"):
            refused()
    with pytest.raises(ChatError, match="knows none, high, max"):
        template.effort("colossal")


def test_a_template_without_effort_refuses_it(tokenizer: Tokenizer) -> None:
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer)
    for level in ("high", "none"):
        with pytest.raises(ChatError, match="knows no reasoning effort"):
            plain.effort(level)


def test_glm_5_3_always_starts_in_reasoning(template_5_3: ChatTemplate) -> None:
    history = [USER, {"role": "assistant", "content": "a", "reasoning_content": "why"}, USER]
    assert template_5_3.render(history, reasoning_effort="low").in_reasoning
    assert "why" not in template_5_3.render(history).text
    assert "<think>why</think>a" in template_5_3.render(history, clear_thinking=False).text


# -- messages as clients send them --------------------------------------------------------------------------------------


def test_content_parts_of_anthropic_render_as_those_of_openai(template: ChatTemplate) -> None:
    anthropic = [
        {"role": "user", "content": [{"type": "text", "text": "Add", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I add.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well:"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "4", "is_error": True},
                {"type": "tool_result", "tool_use_id": "3"},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    openai = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add"}]},
        {
            "role": "assistant",
            "content": "Well:",
            "reasoning": "I add.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "2", "type": "function", "function": {"name": "add", "arguments": ""}},
            ],
        },
        *({"role": "tool", "content": content} for content in ("3", "4", None)),
        {"role": "user", "content": "Go on."},
    ]
    assert template.render(anthropic, clear_thinking=False) == template.render(openai, clear_thinking=False)
    assert "<|observation|><tool_response>3</tool_response><tool_response>4" in template.render(anthropic).text


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "source": {}}],
        [{"type": "tool_result", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}],
        [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
    ],
)
def test_parts_that_cannot_stand_there_are_refused(content: list[Any], template: ChatTemplate) -> None:
    with pytest.raises(ChatError, match=r"messages\[1\].content.*only text parts"):
        template.render([USER, {"role": "user", "content": content}])


@pytest.mark.parametrize(
    "text", ['{"a": "x, \\\\", "k": [1, {"y": "é"}], "z": "\\u00e9"}', '{"a": {"b": []}, "c": "}{", "d": -1.5e3}']
)
def test_a_call_that_was_cut_is_shown_as_far_as_it_went(text: str, template: ChatTemplate) -> None:
    """Clients send back what they were told: refused, the conversation could never go on."""
    whole = json.loads(text)
    for cut in range(1, len(text) + 1):
        told = told_arguments(text[:cut])
        assert list(told) == list(whole)[: len(told)] and all(told[key] == whole[key] for key in list(told)[:-1])
    call = {"id": "1", "function": {"name": "f", "arguments": '{"path": "a.py", "text": "def f'}}
    prompt = template.render([USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "cut"}])
    assert "<arg_key>text</arg_key><arg_value>def f</arg_value></tool_call>" in prompt.text
    for wrong in ("[1", "x", "{a", '{"a" 1', '{"a": 1}}', '{"a": [1}'):
        with pytest.raises(ValueError, match="line 1 column"):
            told_arguments(wrong)


def test_results_come_in_the_order_of_their_calls(template: ChatTemplate) -> None:
    """The template shows no ids: the first result is the first call's, whatever ended first."""

    def conversation(*ids: str) -> list[dict[str, Any]]:
        calls = [{"id": id, "function": {"name": f"f{id}", "arguments": "{}"}} for id in "123"]
        results = [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ids]
        return [USER, {"role": "assistant", "tool_calls": calls}, *results]

    wanted = template.render(conversation("1", "2", "3")).text
    assert wanted.index("of 1") < wanted.index("of 2") < wanted.index("of 3")
    assert template.render(conversation("3", "1", "2")).text == wanted
    twice = [*conversation("1", "2", "3"), *conversation("2", "1", "3")[1:]]
    assert template.render(twice) == template.render([*conversation("1", "2", "3"), *conversation("1", "2", "3")[1:]])
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": f"of {id}"} for id in "231"]
    assert template.render([*conversation()[:2], {"role": "user", "content": blocks}]).text == wanted
    unknown = template.render(conversation("3", "x", "1")).text
    assert unknown.index("of 3") < unknown.index("of x") < unknown.index("of 1")


def test_a_model_is_told_of_what_it_cannot_see_in_results(template: ChatTemplate) -> None:
    """It called for the picture. One refused with the history would end the conversation: it would be refused for ever."""
    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    turn = [USER, {"role": "assistant", "tool_calls": [call]}]
    for kind in ("image_url", "image", "document"):
        parts = [{"type": "text", "text": "pic.png"}, {"type": kind, "source": {"type": "base64", "data": "iVBO"}}]
        openai = template.render([*turn, {"role": "tool", "tool_call_id": "1", "content": parts}])
        result = {"type": "tool_result", "tool_use_id": "1", "content": parts}
        assert template.render([*turn, {"role": "user", "content": [result]}]) == openai
        name = kind.partition("_")[0]
        assert f"pic.png[{name} left out: this model reads text only]" in openai.text and "iVBO" not in openai.text


def test_a_picture_that_was_refused_does_not_end_the_conversation(template: ChatTemplate) -> None:
    """Clients that keep it could never go on; with the last message it is refused, so that the user hears of it."""
    for kind in ("image_url", "image", "file"):
        picture = {
            "role": "user",
            "content": [{"type": "text", "text": "look"}, {"type": kind, "source": {"data": "iVBO"}}],
        }
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}
        for behind in ([], [{"role": "tool", "tool_call_id": "1", "content": "x"}], [result]):
            with pytest.raises(ChatError, match=rf"messages\[1\].content\[1\].{kind}: only text parts"):
                template.render([USER, picture, *behind])
        for behind in ([USER], [{"role": "assistant", "content": "I cannot."}, USER]):
            text = template.render([USER, picture, *behind]).text
            assert f"look[{kind.partition('_')[0]} left out: this model reads text only]" in text and "iVBO" not in text


def test_deep_nesting_is_refused(template: ChatTemplate) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":' * 100_000 + "1" + "}" * 100_000}}
    with pytest.raises(ChatError, match=r"nested too deeply|not valid JSON"):
        template.render([USER, {"role": "assistant", "tool_calls": [call]}])
    deep: dict[str, Any] = {}
    for _ in range(950):
        deep = {"a": deep}
    try:  # from Python 3.12 on, its JSON encoder goes deeper than functions do
        text = template.render([USER], [{"function": {"name": "f", "parameters": deep}}]).text
    except ChatError as error:
        assert "nested too deeply" in str(error)
    else:
        assert text.count('{"a": ') >= 949


def test_attribution_lines_do_not_defeat_the_prefix_cache(template: ChatTemplate) -> None:
    """Requests that differ in nothing else have the same tokens, in whatever shape the line comes."""

    def prompt(system: Any) -> ChatPrompt:
        return template.render([{"role": "system", "content": system}, USER])

    def line(number: int) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.{number}.0d9; cc_entrypoint=cli; cch={number:05x};"

    plain = prompt("You are an agent.\nBe brief.")
    for number in (1, 77777):
        assert prompt(f"{line(number)}\nYou are an agent.\nBe brief.") == plain
        parts = [{"type": "text", "text": text} for text in (line(number), "You are an agent.", "\nBe brief.")]
        assert prompt(parts) == plain
        assert prompt([{"type": "text", "text": line(number)}]) == prompt("")
    # Anywhere else it is text like any other.
    inside = f"You are an agent.\n{line(1)}"
    assert line(1) in prompt(inside).text
    assert line(1) in template.render([{"role": "user", "content": line(1)}]).text


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jinja", "config", "expected"),
    [
        ("A", None, "A"),
        ("A", {"chat_template": "B"}, "A"),
        (None, {"chat_template": "B"}, "B"),
        (None, {"chat_template": [{"name": "tool_use", "template": "C"}, {"name": "default", "template": "D"}]}, "D"),
        (None, {"chat_template": []}, None),
        (None, {}, None),
        (None, None, None),
    ],
)
def test_which_template_wins(
    jinja: str | None, config: Any, expected: str | None, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if expected is None:
        with pytest.raises(ChatError, match="cannot chat"):
            ChatTemplate.open(Folder(tmp_path), tokenizer)
    else:
        assert ChatTemplate.open(Folder(tmp_path), tokenizer).render([USER]).text == expected


@pytest.mark.parametrize("name", ["messages", "tools", "self", "add_generation_prompt"])
def test_arguments_named_like_our_own_are_refused(template: ChatTemplate, name: str) -> None:
    with pytest.raises(ChatError, match=f"^{name}: the chat template reads no such argument"):
        template.render([{"role": "user", "content": "hi"}], None, **{name: []})


def test_an_effort_that_is_no_word_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(ChatError, match="reasoning_effort: must be a string"):
        template.render([{"role": "user", "content": "hi"}], reasoning_effort=["high"])
