"""instructor against the server at argv[1]: a typed answer by tool, by strict tool, by JSON schema, and as it grows."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
BRIEF = {"thinking_token_budget": 16}  # a small model may reason for long
ASK = [{"role": "user", "content": "Which colour has the third wall?"}]


class Paint(BaseModel):
    n: int = Field(ge=0, le=999)
    colour: Literal["red", "green", "blue"]
    ok: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    typed = instructor.from_openai(client, mode=mode)
    paint, reply = typed.chat.completions.create_with_completion(
        model="small", messages=ASK, response_model=Paint, max_retries=0, max_tokens=400, extra_body=BRIEF
    )
    assert isinstance(paint, Paint) and reply.usage.completion_tokens > 0, (mode, paint)
    print(mode, paint)

typed = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
grown = list(
    typed.chat.completions.create_partial(
        model="small", messages=ASK, response_model=Paint, max_tokens=400, extra_body=BRIEF
    )
)
assert len(grown) > 1 and Paint.model_validate(grown[-1].model_dump()), grown
