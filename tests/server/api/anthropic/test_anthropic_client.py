"""The `anthropic` client, unmodified, against a real engine: messages, streams, tools, thinking, counting, errors."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.server.live import Live

TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
HI = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The client's package: its import takes seconds, so it is left to the process that runs these tests."""
    return importlib.import_module("anthropic")


@pytest.fixture(scope="module")
def client(real: Live, anthropic: Any) -> Any:
    return anthropic.Anthropic(base_url=real.url, api_key="unused", max_retries=0)


def test_a_message_and_its_stream_agree(client: Any) -> None:
    whole = client.messages.create(model="glm", max_tokens=12, messages=HI, extra_body={"temperature": 0})
    assert whole.content[0].type == "text" and whole.content[0].text
    assert whole.usage.output_tokens == 12 and whole.stop_reason == "max_tokens"
    with client.messages.stream(model="glm", max_tokens=12, messages=HI, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12


def test_a_forced_call_has_typed_input(client: Any) -> None:
    message = client.messages.create(
        model="glm",
        max_tokens=200,
        messages=HI,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "add"},
        extra_body={"temperature": 0},
    )
    call = message.content[-1]
    assert call.type == "tool_use" and call.name == "add" and message.stop_reason == "tool_use"
    assert set(call.input) == {"a", "b"} and all(isinstance(value, int) for value in call.input.values())
    answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12"}]}
    history = [*HI, {"role": "assistant", "content": message.content}, answer]
    again = client.messages.create(
        model="glm", max_tokens=8, messages=history, tools=[TOOL], extra_body={"temperature": 0}
    )
    assert again.usage.output_tokens > 0


def test_thinking_within_a_budget(client: Any) -> None:
    with client.messages.stream(
        model="glm",
        max_tokens=64,
        messages=HI,
        extra_body={"temperature": 0},
        thinking={"type": "enabled", "budget_tokens": 12},
    ) as stream:
        kinds = [event.content_block.type for event in stream if event.type == "content_block_start"]
        message = stream.get_final_message()
    assert kinds[0] == "thinking" == message.content[0].type and "text" in kinds


def test_counting_and_caching(client: Any) -> None:
    long = [{"role": "user", "content": "word " * 300}]
    counted = client.messages.count_tokens(model="glm", messages=long).input_tokens
    first, second = (client.messages.create(model="glm", max_tokens=2, messages=long).usage for _ in range(2))
    for usage in (first, second):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    assert (second.cache_read_input_tokens or 0) >= 64 * (counted // 64 - 1)


def test_errors_are_the_clients_own(client: Any, anthropic: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        client.messages.create(model="glm", max_tokens=2, messages=HI, extra_body={"top_p": 2})
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(model="glm", max_tokens=2, messages=[{"role": "user", "content": "x y " * 4000}])
