"""`client.responses` of the unmodified `openai` client against a real engine on the CPU: whole, streamed, tools, parse."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pydantic
import pytest

MODEL = "small"
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
ASKED: Any = {"model": MODEL, "input": "Add two and three.", "temperature": 0}
QUICK: Any = {**ASKED, "reasoning": {"effort": "none"}}


class Sure(pydantic.BaseModel):
    sure: bool


def said(response: Any) -> list[Any]:
    """What stands in the items, without their ids."""
    return [
        (
            item.type,
            item.status,
            [part.text for part in item.content] if item.type != "function_call" else item.arguments,
        )
        for item in response.output
    ]


def test_a_stream_gives_what_the_whole_response_gives(openai_client: Any) -> None:
    budget: Any = {"extra_body": {"thinking_token_budget": 8}, "max_output_tokens": 24}
    whole = openai_client.responses.create(**ASKED, **budget)
    assert whole.status == "incomplete" and whole.incomplete_details and whole.output_text
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 24
    assert whole.usage.output_tokens_details.reasoning_tokens == 8
    pieces: dict[str, str] = {}
    final: Any = None
    for event in openai_client.responses.create(**ASKED, **budget, stream=True):
        if event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
            pieces[event.type] = pieces.get(event.type, "") + event.delta
        elif event.type == "response.incomplete":
            final = event.response
    assert said(final) == said(whole) and final.output_text == whole.output_text
    assert pieces["response.output_text.delta"] == whole.output_text
    assert pieces["response.reasoning_text.delta"] == said(whole)[0][2][0]
    importlib.import_module("openai.types.responses").Response.model_validate(
        json.loads(whole.model_dump_json()), strict=False
    )


def test_a_call_and_its_output_in_a_conversation(openai_client: Any) -> None:
    """The client's accumulated stream, with typed arguments; then its own objects go back as they are."""
    with openai_client.responses.stream(
        **QUICK, tools=[ADD], tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False
    ) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[-1] == "response.completed" and "response.function_call_arguments.delta" in kinds
    call: Any = response.output[-1]
    assert call.type == "function_call" and set(call.parsed_arguments) == {"a", "b"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    for items in (response.output, [item.model_dump() for item in response.output]):
        history: Any = [{"role": "user", "content": ASKED["input"]}, *items, output]
        answer = openai_client.responses.create(
            **{**QUICK, "input": history}, tools=[ADD], tool_choice="none", max_output_tokens=6
        )
        assert answer.output_text and answer.output[0].type == "message"


def test_parse_gives_an_object(openai_client: Any) -> None:
    parsed = openai_client.responses.parse(**QUICK, text_format=Sure, max_output_tokens=64)
    assert isinstance(parsed.output_parsed, Sure)
    with openai_client.responses.stream(**QUICK, text_format=Sure, max_output_tokens=64) as stream:
        assert stream.until_done().get_final_response().output_parsed == parsed.output_parsed


def test_log_probabilities(openai_client: Any) -> None:
    response = openai_client.responses.create(
        **QUICK, max_output_tokens=5, include=["message.output_text.logprobs"], top_logprobs=2
    )
    message: Any = response.output[0]
    assert "".join(entry.token for entry in message.content[0].logprobs) == response.output_text
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in message.content[0].logprobs)


def test_errors_are_the_clients_own(openai_client: Any, openai: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="nothing is stored") as bad:
        openai_client.responses.create(**QUICK, previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="web_search"):
        openai_client.responses.create(**QUICK, tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve("resp_1")
