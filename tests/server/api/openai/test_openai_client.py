"""The unmodified `openai` client against a real engine on the CPU: chat, streams, tools, parse, completions, models, errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pydantic
import pytest

MODEL = "small"
HI: Any = [{"role": "user", "content": "Add two and three."}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
QUICK: Any = {"reasoning_effort": "none", "seed": 1, "temperature": 0}


class Sure(pydantic.BaseModel):
    sure: bool


def test_models(openai_client: Any) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]
    assert openai_client.models.retrieve(MODEL).id == MODEL


def test_a_stream_gives_what_the_whole_reply_gives(openai_client: Any) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": HI,
        "max_tokens": 24,
        "seed": 3,
        "extra_body": {"thinking_token_budget": 8},
    }
    whole = openai_client.chat.completions.create(**asked)
    reasoning = content = ""
    reason, usage = None, None
    for chunk in openai_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content, whole.choices[0].finish_reason) == (reasoning, content, reason)
    assert message.reasoning == reasoning and reasoning and content
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 8


def test_parse_gives_an_object(openai_client: Any) -> None:
    parsed = openai_client.chat.completions.parse(
        model=MODEL, messages=HI, response_format=Sure, max_tokens=64, seed=2, extra_body={"thinking_token_budget": 4}
    )
    assert isinstance(parsed.choices[0].message.parsed, Sure)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_tools_are_called_with_arguments_that_fit(openai_client: Any, choice: Any) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": HI,
        "tools": [ADD],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        **QUICK,
    }
    whole = openai_client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
    call: Any = whole.message.tool_calls[0]
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    with openai_client.chat.completions.stream(**asked) as stream:
        final: Any = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert [each.function.arguments for each in final.message.tool_calls] == [call.function.arguments]


def test_a_conversation_with_a_tool_goes_on(openai_client: Any) -> None:
    first = openai_client.chat.completions.create(
        model=MODEL, messages=HI, tools=[ADD], tool_choice="required", parallel_tool_calls=False, **QUICK
    ).choices[0]
    assert first.message.tool_calls
    history: Any = [
        *HI,
        first.message.model_dump(),
        {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "5"},
    ]
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=history, tools=[ADD], tool_choice="none", max_tokens=8, **QUICK
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_a_free_form_tool_is_called_with_text_that_fits(openai_client: Any) -> None:
    """Whole, streamed, and back again as the client's own objects."""
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r'say\("[a-z]{3,9}\\n"\)\n/\* ü \*/'}}
    tools: Any = [ADD, {"type": "custom", "custom": {"name": "run", "description": "Runs a program.", "format": form}}]
    choice: Any = {"type": "custom", "custom": {"name": "run"}}
    asked: Any = {"model": MODEL, "messages": HI, "tools": tools, "tool_choice": choice, **QUICK}
    whole = openai_client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.type, call.custom.name) == ("tool_calls", "custom", "run")
    assert re.fullmatch(r'say\("[a-z]{3,9}\\n"\)\n/\* ü \*/', call.custom.input)
    pieces: list[str] = []
    for chunk in openai_client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is None and (delta.type == "custom") == (not pieces)
            pieces.append(delta.custom["input"])
    assert "".join(pieces) == call.custom.input and len(pieces) > 3
    for turn in (whole.message, whole.message.model_dump()):
        history: Any = [*HI, turn, {"role": "tool", "tool_call_id": call.id, "content": "ran"}]
        answer = openai_client.chat.completions.create(
            **{**asked, "messages": history, "tool_choice": "none"}, max_tokens=8
        )
        assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_text_completions(openai_client: Any) -> None:
    asked: Any = {
        "model": MODEL,
        "prompt": ["import ", "def f("],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
        "seed": 1,
    }
    whole = openai_client.completions.create(**asked)
    texts = ["", ""]
    for chunk in openai_client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == texts
    assert all(choice.logprobs and len(choice.logprobs.token_logprobs or ()) == 6 for choice in whole.choices)


def test_errors_are_the_clients_own(openai_client: Any, openai: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        openai_client.chat.completions.create(model=MODEL, messages=HI, max_tokens=5000)
    assert bad.value.code == "context_length_exceeded" and "2048" in str(bad.value) and "5000" in str(bad.value)
    with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
        openai_client.chat.completions.create(model=MODEL, messages=HI, extra_body={"temprature": 1})
