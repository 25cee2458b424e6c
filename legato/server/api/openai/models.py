"""/v1/models, and text to token ids and back.

Owns those small routes. Knows no engine but its context length. Mounted by `server.app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import Response as PlainResponse
from pydantic import Field
from typing_extensions import TypedDict

from legato.server.api.openai.chat_request import Message, ToolDefinition
from legato.server.api.openai.completions import MAX_PROMPTS
from legato.server.api.openai.logprobs import token_text
from legato.server.api.openai.schema import ModelCard, ModelList
from legato.server.api.sampling_fields import TokenId
from legato.server.api.service import Service
from legato.server.http.errors import Documented
from legato.server.http.sse import json_bytes
from legato.server.http.validation import JsonRoute, OnlyTrue, RequestModel
from legato.server.tools.definitions import Tools
from legato.types import ParameterError


class TokenizeRequest(RequestModel):
    """A text (or several), or a conversation, which is rendered first."""

    model: str | None = None
    prompt: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[ToolDefinition] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = Field(None, description="Whether the tokenizer frames a text; left out: yes.")
    add_generation_prompt: OnlyTrue | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """Token ids, or a list of such lists."""

    model: str | None = None
    tokens: list[TokenId] | Annotated[list[list[TokenId]], Field(max_length=MAX_PROMPTS)]


class Tokenized(TypedDict):
    """Token ids; of several texts, a list for each."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: NotRequired[list[str] | list[list[str]]]


class Detokenized(TypedDict):
    """The text under both names that clients look for."""

    prompt: str | list[str]
    text: str | list[str]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    errors = Documented((401, 404, 431, 500))

    @routes.get("/v1/models", response_model=ModelList, responses=errors.responses())
    async def list_models() -> Response:
        """The names that requests may use."""
        return _json({"object": "list", "data": [_card(service, name) for name in service.model_names]})

    @routes.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors.responses())
    async def show_model(model: str) -> Response:
        """One of them."""
        if model not in service.model_names and not service.settings.any_model:
            service.model(model)
        return _json(_card(service, model))

    for prefix in ("", "/v1"):
        _add_texts(routes, service, prefix)
    return routes


def _add_texts(routes: APIRouter, service: Service, prefix: str) -> None:
    responses = Documented((400, 401, 404, 413, 415, 431, 500)).responses()

    @routes.post(f"{prefix}/tokenize", response_model=Tokenized, responses=responses, operation_id=f"tokenize{prefix}")
    async def tokenize(request: TokenizeRequest, http: Request) -> Response:
        """Text or a conversation as token ids, as a completion or a chat would see them."""
        service.model(request.model)
        return _json(await service.beside(lambda: _tokenized(service, request), len(await http.body())))

    @routes.post(
        f"{prefix}/detokenize", response_model=Detokenized, responses=responses, operation_id=f"detokenize{prefix}"
    )
    async def detokenize(request: DetokenizeRequest, http: Request) -> Response:
        """Token ids as text; bytes that are no UTF-8 become U+FFFD."""
        service.model(request.model)
        text = await service.beside(lambda: _text(service, request.tokens), len(await http.body()))
        return _json({"prompt": text, "text": text})


def _tokenized(service: Service, request: TokenizeRequest) -> Tokenized:
    tokenizer = service.text.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise ParameterError("prompt", "give either prompt or messages")
    if request.messages is None:
        for name in ("tools", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt"):
            if getattr(request, name) is not None:
                raise ParameterError(name, "needs messages")
    several: list[list[int]]
    if request.messages is not None:
        if request.add_special_tokens is not None:
            raise ParameterError("add_special_tokens", "needs prompt: the chat template decides about special tokens")
        tools = Tools.from_openai(request.tools)
        arguments = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            arguments |= service.template.effort(request.reasoning_effort)
        rendered = service.template.render(request.messages, None if tools is None else tools.definitions, **arguments)
        several = [list(rendered.ids)]
    else:
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
        encode = tokenizer.encode if request.add_special_tokens is False else tokenizer.encode_prompt
        several = [encode(prompt) for prompt in prompts]
    is_single = request.messages is not None or isinstance(request.prompt, str)
    reply: Tokenized = {
        "count": len(several[0]) if is_single else [len(ids) for ids in several],
        "max_model_len": service.engine.info.context,
        "tokens": several[0] if is_single else several,
    }
    if request.return_token_strs:
        texts = [[token_text(tokenizer, token) for token in ids] for ids in several]
        reply["token_strs"] = texts[0] if is_single else texts
    return reply


def _text(service: Service, tokens: Sequence[int] | Sequence[Sequence[int]]) -> str | list[str]:
    size = service.engine.info.vocab_size
    if tokens and not isinstance(tokens[0], int):
        return [cast(str, _text(service, ids)) for ids in cast(Sequence[Sequence[int]], tokens)]
    ids = cast(Sequence[int], tokens)
    for position, token in enumerate(ids):
        if token >= size:
            raise ParameterError(f"tokens[{position}]", f"must be a token id from 0 to {size - 1}, got {token}")
    return service.text.tokenizer.decode(ids)


def _card(service: Service, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "legato",
        "root": service.model_names[0],
        "max_model_len": service.engine.info.context,
    }


def _json(reply: Any) -> Response:
    return PlainResponse(json_bytes(reply), media_type="application/json")
