"""pydantic-ai against the server at argv[1]: text, streamed text, typed output by tool and by schema; all three APIs."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL = sys.argv[1]
OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
CHAT = OpenAIChatModel("small", provider=OPENAI)
RESPONSES = OpenAIResponsesModel("small", provider=OPENAI)
CLAUDE = AnthropicModel("small", provider=AnthropicProvider(base_url=URL, api_key="none"))


class Paint(BaseModel):
    n: int = Field(ge=0, le=999)
    colour: Literal["red", "green", "blue"]
    ok: bool


async def main() -> None:
    greedy = ModelSettings(max_tokens=12, temperature=0)
    for model in (CHAT, RESPONSES, CLAUDE):
        # The answer of a small model may be all reasoning when it is cut: then there is no text to return.
        agent = Agent(model, retries=0)
        async with agent.iter("Write a function that counts words.", model_settings=greedy) as run:
            node = run.next_node
            while not hasattr(node, "model_response"):
                node = await run.next(node)
        parts = node.model_response.parts
        assert parts and node.model_response.usage.output_tokens == 12, node.model_response
        print(model.system, [type(part).__name__ for part in parts])

    chat = ModelSettings(max_tokens=400, extra_body={"thinking_token_budget": 16})  # a small model may reason for long
    responses = ModelSettings(max_tokens=400, extra_body={"reasoning": {"effort": "none"}})
    for model, settings, output in (
        (CHAT, chat, ToolOutput(Paint)), (CHAT, chat, NativeOutput(Paint)), (RESPONSES, responses, ToolOutput(Paint)),
        (RESPONSES, responses, NativeOutput(Paint)), (CLAUDE, ModelSettings(max_tokens=400), ToolOutput(Paint)),
    ):  # fmt: skip
        result = await Agent(model, output_type=output, retries=0).run("Which colour?", model_settings=settings)
        assert isinstance(result.output, Paint), result
        print(model.system, type(output).__name__, result.output)

    agent = Agent(CHAT, output_type=NativeOutput(Paint), retries=0)
    async with agent.run_stream("Which colour?", model_settings=chat) as streamed:
        seen = [paint async for paint in streamed.stream_output()]
    assert seen and isinstance(seen[-1], Paint), seen


asyncio.run(main())
