"""While the model loads: who only asks whether the process lives is told so, everyone else how far loading is."""

from __future__ import annotations

from starlette.testclient import TestClient

from legato.engine.messages import Loading
from legato.server.http.doorway import Doorway


def test_alive_while_loading_and_errors_in_the_dialect_of_the_route() -> None:
    doorway = Doorway()
    doorway.loading = Loading("weights", 3, 7)
    client = TestClient(doorway)  # type: ignore[arg-type]
    ping = client.get("/ping")
    assert (ping.status_code, ping.json()) == (200, {"status": "alive"})
    health, chat, messages = client.get("/health"), client.post("/v1/chat/completions"), client.post("/v1/messages")
    for reply in (health, chat, messages):
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
        assert reply.json()["loading"] == {"stage": "weights", "done": 3, "total": 7} and "(weights)" in reply.text
    assert chat.json()["error"]["code"] == "loading"
    assert messages.json()["type"] == "error" and messages.json()["error"]["type"] == "overloaded_error"
