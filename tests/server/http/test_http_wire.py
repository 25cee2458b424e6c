"""HTTP over a real socket, whatever route is asked: limits, keys, origins, silence, and clients that go away."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from legato.server.settings import Access, Replies, RequestLimits, ServerSettings
from tests.server.scripted import HI, Server, error_of


def test_a_body_that_stops_is_refused(made: Callable[[ServerSettings], Server]) -> None:
    server = made(ServerSettings(limits=RequestLimits(body_timeout_s=1.0)))
    whole = posted(json.dumps({"messages": HI}).encode())
    with socket.create_connection(("127.0.0.1", server.live.port), timeout=20) as sock:
        sock.sendall(whole[:-5])
        reply = b""
        while data := sock.recv(4096):
            reply += data
    assert reply.startswith(b"HTTP/1.1 408 ") and b"nothing of the body came for 1 s" in reply
    assert server.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_takes_no_requests(server: Server, stream: bool) -> None:
    server.engine.state = "draining"
    reply = server.chat(stream=stream)
    assert "shutting down" in error_of(reply, 503)["message"] and reply.headers["retry-after"]


@pytest.mark.parametrize("sent", [0, 10, 60])
def test_a_client_that_goes_away_before_it_has_asked_harms_nobody(server: Server, sent: int) -> None:
    body = json.dumps({"messages": HI, "user": "x" * 100}).encode()
    whole = posted(body)
    with socket.create_connection(("127.0.0.1", server.live.port)) as sock:
        sock.sendall(whole[: len(whole) - len(body) + sent])
        time.sleep(0.05)
    assert server.chat().status_code == 200 and len(server.engine.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["no token", "some tokens"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_goes_away_ends_its_request(server: Server, stream: bool, after: str, n: int) -> None:
    server.engine.step_s = 0.05
    server.said = "word " * 400
    body = json.dumps({"messages": HI, "stream": stream, "n": n}).encode()
    sock = socket.create_connection(("127.0.0.1", server.live.port))
    sock.sendall(posted(body))
    wait_for(lambda: len(server.engine.open) == n)
    if after == "some tokens":
        time.sleep(0.2)
    sock.close()
    wait_for(lambda: not server.engine.open)
    assert len(server.engine.left) == n, "they were ended, and did not end by themselves"
    assert server.live.call(_num_open(server)) == 0
    server.reset()
    assert server.chat().status_code == 200


def posted(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _num_open(server: Server) -> Any:
    async def count() -> int:
        return len(server.engine.open)

    return count


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_silence_is_filled_with_comments(made: Any) -> None:
    server = made(ServerSettings(replies=Replies(keepalive_s=0.05)))
    server.engine.step_s, server.said = 0.3, "word " * 400
    body = {"messages": HI, "stream": True, "max_tokens": 90}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        seen: list[str] = []
        for line in reply.iter_lines():
            seen.append(line)
            if seen.count(": keep-alive") == 3:
                server.engine.step_s = 0.0
    assert seen.count(": keep-alive") >= 3
    chunks = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"


def test_a_slow_reader_does_not_slow_down_others(server: Server) -> None:
    server.said = "word " * 400
    body = json.dumps({"messages": HI, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", server.live.port))
    sock.sendall(posted(body))
    wait_for(lambda: len(server.engine.seen) == 8)
    server.said = "quick<|user|>"
    assert server.chat().status_code == 200, "while nobody reads what the first one is sent"
    sock.close()
    wait_for(lambda: not server.engine.open)


# -- keys and limits --------------------------------------------------------------------------------------------------


def test_any_of_several_keys_opens_every_guarded_route(made: Any) -> None:
    server = made(ServerSettings(access=Access(api_keys=("first-key", "second-key"))))
    for headers, status in (
        ({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer first-key-and-more"}, 401),
        ({"Authorization": "second-key"}, 401), ({"Authorization": "Bearer second-key"}, 200), ({"x-api-key": "first-key"}, 200),
        ({"Authorization": "bearer first-key"}, 200), ({"Authorization": "Bearer wrong", "x-api-key": "first-key"}, 200),
    ):  # fmt: skip
        for path in ("/v1/models", "/openapi.json", "/flush_cache"):
            assert server.http.get(path, headers=headers).status_code == status, (path, headers)
        assert server.http.post("/v1/chat/completions", json={"messages": HI}, headers=headers).status_code == status
    for path in ("/health", "/ready", "/ping", "/metrics"):
        assert server.http.get(path).status_code == 200
    assert "first-key" not in server.http.get("/v1/models").text
    guarded = made(ServerSettings(access=Access(api_keys=("k",), guard_metrics=True, admin_routes=False)))
    assert guarded.http.get("/metrics").status_code == 401
    assert guarded.http.get("/flush_cache", headers={"x-api-key": "k"}).status_code == 404


def test_bodies_are_limited_while_they_arrive(made: Any) -> None:
    server = made(ServerSettings(limits=RequestLimits(max_body_bytes=10_000)))
    error = error_of(server.http.post("/v1/completions", json={"prompt": "x" * 20_000}), 413)
    assert "10000" in error["message"]

    def endless() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 1000

    reply = server.http.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})
    assert error_of(reply, 413)
    assert server.chat().status_code == 200


@pytest.mark.parametrize("endless", [False, True])
def test_headers_are_limited(server: Server, endless: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.live.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        if endless:
            sock.sendall(b"A: " + b"a" * 100_000)
        else:
            sock.sendall(b"".join(b"X-%d: %b\r\n" % (number, b"a" * 100) for number in range(1000)) + b"\r\n")
        sock.settimeout(60)
        reply = b""
        while data := sock.recv(4096):
            reply += data
    assert (
        reply.startswith(b"HTTP/1.1 431 ")
        and json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    )
    assert server.chat().status_code == 200


def test_cors_for_the_origins_that_are_named(made: Any) -> None:
    server = made(ServerSettings(access=Access(cors_origins=("https://page.example",), api_keys=("k",))))
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert (
        server.http.options("/v1/models", headers=ask).headers["access-control-allow-origin"] == "https://page.example"
    )
    reply = server.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert reply.status_code == 401 and reply.headers["access-control-allow-origin"] == "https://page.example"
    assert (
        "access-control-allow-origin"
        not in server.http.get("/ping", headers={"Origin": "https://other.example"}).headers
    )


def test_the_id_of_a_request_is_sent_back(server: Server) -> None:
    assert server.http.get("/ping", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.http.get("/ping", headers={"x-request-id": "no id"}).headers["x-request-id"].startswith("req-")
