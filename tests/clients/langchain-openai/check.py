"""langchain-openai against the server at argv[1]: chat, stream, tools and typed output, over both OpenAI APIs."""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

URL = f"{sys.argv[1]}/v1"
ASK = "Write a function that counts words."


class Paint(BaseModel):
    """Paints a wall."""

    n: int = Field(ge=0, le=999)
    colour: Literal["red", "green", "blue"]
    ok: bool


def model(max_tokens: int, **more: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=URL, api_key="none", model="small", max_tokens=max_tokens, max_retries=0, **more)


BRIEF = {"thinking_token_budget": 16}  # a small model may reason for long
skip = {"chat_template_kwargs": {"enable_thinking": False}}
greedy = model(12, temperature=0, extra_body=skip, stream_usage=True)
whole = greedy.invoke(ASK)
assert whole.content and whole.usage_metadata["output_tokens"] == 12, whole
streamed = None
for chunk in greedy.stream(ASK):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.content == whole.content and streamed.usage_metadata["output_tokens"] == 12, streamed

called = model(400, extra_body=BRIEF).bind_tools([Paint], tool_choice="Paint").invoke(ASK)
assert called.tool_calls and Paint.model_validate(called.tool_calls[0]["args"]), called
gathered = None
for chunk in model(400, extra_body=BRIEF).bind_tools([Paint], tool_choice="any").stream(ASK):
    gathered = chunk if gathered is None else gathered + chunk
assert Paint.model_validate(gathered.tool_calls[0]["args"]), gathered

for method in ("json_schema", "function_calling"):
    typed = model(400, extra_body=skip).with_structured_output(Paint, method=method).invoke(ASK)
    assert isinstance(typed, Paint), (method, typed)

responses = model(12, temperature=0, use_responses_api=True).invoke(ASK)
assert responses.usage_metadata["output_tokens"] == 12, responses
typed = (
    model(400, use_responses_api=True, reasoning={"effort": "none"})
    .with_structured_output(Paint, method="json_schema")
    .invoke(ASK)
)
assert isinstance(typed, Paint), typed
assert OpenAI(base_url=URL, api_key="none", model="small", max_tokens=8, n=1, best_of=1).invoke("def f(")
