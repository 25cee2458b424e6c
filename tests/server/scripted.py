"""A live server around a scripted engine, and a client to it: what the tests of every dialect's wire format talk to."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2

from legato.server.api.service import ModelText
from legato.server.app import create_app
from legato.server.engine.client import GenerationRequest
from legato.server.settings import ServerSettings
from legato.server.telemetry.metrics import Metrics
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


class Server:
    """A live server around a scripted engine, and a client to it."""

    def __init__(self, text: ModelText, settings: ServerSettings) -> None:
        self.text, self.width = text, 3
        self.said = "<think>Hmm, let me see.</think>The answer is 5. <|user|>"
        self.engine = FakeEngine(self._script)
        self.metrics = Metrics("small")

        async def start() -> Any:
            async def end() -> None: ...

            return create_app(self.engine, text, settings, self.metrics), end  # type: ignore[arg-type]

        self.live = Live(start)
        self.http = httpx2.Client(base_url=self.live.url, timeout=120, verify=False)  # else it reads all certificates

    def _script(self, request: GenerationRequest) -> Sequence[Sequence[int]]:
        """What is said behind the prompt: its `<think>` stands in the prompt already."""
        text = (
            self.said.removeprefix("<think>")
            if self.text.tokenizer.control["<think>"] in request.prompt[-2:]
            else self.said
        )
        ids = self.text.tokenizer.encode_template(text)
        return [ids[at : at + self.width] for at in range(0, len(ids), self.width)]

    def reset(self) -> None:
        self.said = "<think>Hmm, let me see.</think>The answer is 5. <|user|>"
        self.engine.step_s, self.engine.fault, self.engine.fault_at, self.engine.state = 0.0, None, 0, "ready"
        self.engine.prefill_chunk, self.engine.says_taken = 10**9, True
        self.engine.seen.clear()
        self.engine.left.clear()

    def chat(self, **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/chat/completions", json={"messages": HI, **fields})

    def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """The events of a stream, the last of which must be [DONE]."""
        body = {"stream": True, **({"messages": HI} if "chat" in path else {}), **fields}
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.text.split("\n\n") if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def close(self) -> None:
        self.http.close()
        self.live.close()


@contextmanager
def aborting(server: Server, steps: int) -> Generator[None]:
    """Everything that runs is aborted by an operator once a request has gone so many steps."""
    script, taken = server.engine.script, threading.Event()

    def watched(request: GenerationRequest) -> Iterator[Sequence[int]]:
        for number, step in enumerate(script(request)):
            if number == steps:
                taken.set()
            yield step

    def abort() -> None:
        assert taken.wait(60)
        server.http.post("/abort_request", json={"abort_all": True})

    server.engine.script, operator = watched, threading.Thread(target=abort)
    operator.start()
    try:
        yield
    finally:
        taken.set()
        operator.join()
        server.engine.script = script


def error_of(reply: httpx2.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    return reply.json()["error"]


def named_events(reply: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a stream whose events have names: each name is the type of its event."""
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = []
    for part in reply.text.split("\n\n"):
        if part and not part.startswith(":"):
            name, data = part.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found
