"""Every field that the OpenAPI document names, given values of every wrong kind: taken, or refused by its name, nothing worse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.scripted import HI, Server

CHAT = "/v1/chat/completions"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": "m", "messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "m", "messages": HI},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 2.5, 1e30, 10**40, True, "", "x", "\0", [], [None], [[]], {}, {"a": 1}, {"type": "x"}, [{"type": "function"}],
)  # fmt: skip


def fields_of(document: dict[str, Any], path: str) -> list[str]:
    """What the request of a route may hold."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return list(schema["properties"])


@pytest.mark.full
@pytest.mark.parametrize("path", LEAST)
def test_any_value_of_any_field_is_taken_or_refused_by_name(server: Server, path: str) -> None:
    names = fields_of(server.http.get("/openapi.json").json(), path)
    assert set(LEAST[path]) <= set(names)
    wrong: list[str] = []
    for name in names:
        for value in VALUES:
            body = json.dumps({**LEAST[path], name: value}).encode()
            reply = server.http.post(path, content=body, headers={"content-type": "application/json"})
            is_other_model = name == "model" and reply.status_code == 404
            is_named = reply.status_code == 400 and name in reply.json()["error"]["message"]
            if not (reply.status_code == 200 or is_named or is_other_model):
                wrong.append(f"{name} = {value!r}: {reply.status_code} {reply.text[:200]}")
    assert not wrong, "\n".join(wrong)
    assert server.http.post(CHAT, json=LEAST[CHAT]).status_code == 200
