"""litellm against the server at argv[1]: chat, stream, tools, formats, text, errors, and the Anthropic route."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices
import litellm
from pydantic import BaseModel, Field

URL = sys.argv[1]
OPENAI = {"model": "hosted_vllm/small", "api_base": f"{URL}/v1", "api_key": "none"}
ASK = [{"role": "user", "content": "Write a function that counts words."}]


class Paint(BaseModel):
    n: int = Field(ge=0, le=999)
    ok: bool


TOOL = {"type": "function", "function": {"name": "paint", "parameters": Paint.model_json_schema()}}

whole = litellm.completion(messages=ASK, max_tokens=40, temperature=0, **OPENAI)
message = whole.choices[0].message
assert message.reasoning_content and message.content, message
assert whole.usage.completion_tokens == 40 and whole.choices[0].finish_reason == "length", whole

stream = litellm.completion(
    messages=ASK, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}, **OPENAI
)
chunks = list(stream)
rebuilt = litellm.stream_chunk_builder(chunks)
assert rebuilt.choices[0].message.content == message.content, rebuilt
assert rebuilt.choices[0].message.reasoning_content == message.reasoning_content, rebuilt
assert chunks[-1].usage.completion_tokens == 40, chunks[-1]

chosen = {"type": "function", "function": {"name": "paint"}}
brief = {"thinking_token_budget": 16}  # a small model may reason for long
called = litellm.completion(
    messages=ASK, max_tokens=200, tools=[TOOL], tool_choice=chosen, extra_body=brief, **OPENAI
).choices[0]
assert called.finish_reason == "tool_calls", called
Paint.model_validate_json(called.message.tool_calls[0].function.arguments)
history = [
    *ASK,
    called.message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "painted"},
]
assert litellm.completion(messages=history, max_tokens=8, tools=[TOOL], **OPENAI).usage.completion_tokens

formed = litellm.completion(messages=ASK, max_tokens=400, response_format=Paint, reasoning_effort="none", **OPENAI)
Paint.model_validate_json(formed.choices[0].message.content)

text = litellm.text_completion(prompt="def f(", max_tokens=8, **{**OPENAI, "model": "text-completion-openai/small"})
assert text.choices[0].text, text

try:
    litellm.completion(messages=ASK, max_tokens=4, temperature=1000, num_retries=0, **OPENAI)
except litellm.BadRequestError as error:
    assert "temperature" in str(error), error
else:
    raise AssertionError("a temperature of 1000 was taken")

claude = litellm.completion(
    model="anthropic/small", api_base=URL, api_key="none", messages=ASK, max_tokens=12, temperature=0
)
assert claude.choices[0].message.content and claude.usage.completion_tokens == 12, claude
pieces = litellm.completion(
    model="anthropic/small", api_base=URL, api_key="none", messages=ASK, max_tokens=12, temperature=0, stream=True
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == claude.choices[0].message.content
print(json.dumps({"client": "litellm", "ok": True}))
