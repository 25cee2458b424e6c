"""What a hostile newcomer tried: old HTTP, ids that no vocabulary has, one id spelled in two ways."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from legato.server.engine.client import GenerationRequest, RequestRefused
from legato.server.engine.submission import framed
from legato.types import SamplingParams
from tests.server.live import Live
from tests.server.scripted import HI, Server, error_of


def over_http_1_0(server: Server, **fields: object) -> tuple[str, bytes]:
    """Head and body of a reply."""
    body = json.dumps({"messages": HI, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.live.port), timeout=120) as sock:
        sock.sendall(head.encode() + body)
        reply = b"".join(iter(lambda: sock.recv(65536), b""))
    found, _, rest = reply.partition(b"\r\n\r\n")
    return found.decode().lower(), rest


def test_a_client_of_http_1_0_gets_no_chunks(server: Server) -> None:
    head, body = over_http_1_0(server, stream=True)
    assert " 200 ok" in head and "transfer-encoding" not in head and "connection: close" in head
    events = body.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    head, body = over_http_1_0(server)
    assert f"content-length: {len(body)}" in head and json.loads(body)["choices"]


def test_the_head_of_every_page_can_be_asked_for(server: Server) -> None:
    for path in ("/", "/v1/models", "/metrics", "/openapi.json"):
        head, page = server.http.head(path), server.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == page.headers["content-type"] and int(head.headers["content-length"]) > 0
    assert server.http.head("/v1/chat/completions").status_code == 405
    assert server.http.get("/ping").status_code == 200, "the connection has not lost its place"


def test_an_encoded_body_is_refused_by_its_encoding(server: Server) -> None:
    reply = server.http.post("/v1/chat/completions", json={"messages": HI}, headers={"content-encoding": "gzip"})
    assert "gzip" in error_of(reply, 415)["message"]
    identity = {"content-encoding": "identity"}
    assert server.http.post("/v1/chat/completions", json={"messages": HI}, headers=identity).status_code == 200


def test_who_says_nothing_or_half_a_header_is_cut_off() -> None:
    async def start() -> Any:
        async def end() -> None: ...

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(1.6)
            await PlainTextResponse("late")(scope, receive, send)

        return slow, end

    live = Live(start, patience_s=0.8)
    try:
        for said in (b"", b"GET / HTTP/1.1\r\nhost: x\r\nslo"):
            with socket.create_connection(("127.0.0.1", live.port), timeout=120) as sock:
                sock.sendall(said)
                assert sock.recv(100) == b"", "closed without an answer"
        with socket.create_connection(("127.0.0.1", live.port), timeout=120) as sock:
            for piece in (b"GET / HTTP/1.1\r\n", b"host: x\r\n", b"\r\n"):
                sock.sendall(piece)
            time.sleep(0.05)
            sock.sendall(b"\r\n")
            reply = b"".join(iter(lambda: sock.recv(1000), b""))
            assert reply.endswith(b"late"), "an answer may take its time, and a stray line end does not end it"
    finally:
        live.close()


def test_a_bias_is_given_once(server: Server) -> None:
    error = error_of(server.chat(logit_bias={"05": 1, "5": 2}), 400)
    assert error["param"] == "logit_bias.05"
    assert server.chat(logit_bias={"0": 1, "5": 2}).status_code == 200


def test_a_stop_id_outside_the_vocabulary_is_told_by_its_own_name() -> None:
    params = SamplingParams(stop_token_ids=(9,))
    with pytest.raises(RequestRefused, match="stop_token_ids: token 0 is 9; the vocabulary has 8") as refused:
        framed("a", GenerationRequest((1,), params, (3, 9)), 8)
    assert refused.value.field == "stop_token_ids"
