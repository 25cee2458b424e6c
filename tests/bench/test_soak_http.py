"""The soak over HTTP, on a scripted engine behind the real server: a clean run is clean, and each fault it looks for is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from legato.bench.load.wire import Wire
from legato.bench.resident import Growth
from legato.bench.soak_http.asks import LONG, Asks
from legato.bench.soak_http.clients import Clients
from legato.bench.soak_http.ledger import Ledger, Scrape
from legato.bench.soak_http.replies import PATHS, Api, Choice, QueueFull, Reply, ReplyError, read_event
from legato.server.api.service import ModelText
from legato.server.app import create_app
from legato.server.engine.client import GenerationRequest, RequestRefused
from legato.server.settings import RequestLimits, ServerSettings
from legato.server.telemetry.metrics import Metrics
from legato.server.text.tokenizer import Folder
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live

SMALL = Path(__file__).resolve().parents[2] / "legato" / "checkpoints" / "small"
TEXTS = ["def count(words):\n    return len(words.split())\n" * 60]
UNCONSTRAINED = ("chat", "several", "completions", "sentinel", "aborts", "leaves", "walks off", "bad")
"""What an engine that keeps to no grammar and no deadline can answer."""


class Scripted:
    """A server whose engine says `said`, or, where it is told to ignore the end, goes on for as long as anybody wants."""

    def __init__(self) -> None:
        self.text = ModelText.open(Folder(SMALL))
        self.said = "Let me see.</think>The answer is 5."
        self.engine = FakeEngine(self._script, step_s=0.005, context=1536)
        self.live = Live(self._start)

    def _script(self, request: GenerationRequest) -> list[list[int]]:
        ids = self.text.tokenizer.encode_template(self.said + "<|user|>")
        if not request.stop_ids:
            return [[token] for token in (ids[:4] * LONG)[:LONG]]
        return [ids[at : at + 3] for at in range(0, len(ids), 3)]

    async def _start(self) -> tuple[Any, Callable[[], Awaitable[None]]]:
        async def end() -> None: ...

        engine: Any = self.engine
        settings = ServerSettings(limits=RequestLimits(max_body_bytes=1 << 20))
        return create_app(engine, self.text, settings, Metrics("small")), end


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.live.close()


def asks(*kinds: str) -> Asks:
    drawn = Asks(TEXTS, seed=1)
    drawn._kinds = {kind: entry for kind, entry in drawn._kinds.items() if kind in kinds}
    drawn._bad = [ask for ask in drawn._bad if b"regex" not in ask.body]  # the engine compiles them
    return drawn


def soaked(scripted: Scripted, count: int, *kinds: str, ledger: Ledger | None = None) -> tuple[Ledger, Scrape]:
    """The books after so many requests, and what the server counted meanwhile."""
    clients = Clients(scripted.live.url, asks(*kinds), ledger or Ledger(), seed=1)

    async def run() -> Scrape:
        before = await scrape(scripted.live.url)
        await clients.run(4, lambda: sum(clients.ledger.kinds.values()) >= count, exact=False)
        for _ in range(200):  # what a client has read to its end is counted soon after
            counted = (await scrape(scripted.live.url)).since(before)
            if not scripted.engine.open and not clients.ledger.disagreements(counted):
                return counted
            await asyncio.sleep(0.1)
        return (await scrape(scripted.live.url)).since(before)

    return clients.ledger, asyncio.run(run())


async def scrape(url: str) -> Scrape:
    async with Wire(url, 120.0) as wire:
        return Scrape.of((await wire.get("/metrics", {}))[1].decode())


@pytest.mark.full
def test_both_sides_count_the_same_whatever_the_clients_do(scripted: Scripted) -> None:
    ledger, counted = soaked(scripted, 150, *UNCONSTRAINED)
    assert ledger.wrong == [] and ledger.disagreements(counted) == []
    assert set(ledger.kinds) == set(UNCONSTRAINED) and ledger.ends["abort"].least and ledger.refused["invalid"].least
    assert scripted.engine.left, "no client has left"


def test_a_client_that_leaves_within_its_body_has_asked_for_nothing(scripted: Scripted) -> None:
    async def leave() -> Scrape:
        for path in PATHS.values():
            _, writer = await asyncio.open_connection("127.0.0.1", scripted.live.port)
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
            writer.write(head.encode() + b'{"messages": [')
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.2)
        return await scrape(scripted.live.url)

    counted = asyncio.run(leave())
    assert counted.total("requests_refused_total") == counted.total("requests_total") == 0


@pytest.mark.parametrize(
    ("name", "label", "words"),
    [
        ("requests_total", "stop", "ended with stop"),
        ("prompt_tokens_total", "", "prompt tokens"),
        ("generation_tokens_total", "content", "generated tokens"),
        ("requests_refused_total", "other", "refused as anything else"),
    ],
)
def test_a_counter_that_is_off_by_one_is_told(scripted: Scripted, name: str, label: str, words: str) -> None:
    ledger, counted = soaked(scripted, 12, "chat", "completions")
    assert ledger.disagreements(counted) == []
    counted[name, label] += 1
    assert [words in fault for fault in ledger.disagreements(counted)] == [True]


def test_another_answer_to_the_sentinel_is_a_fault(scripted: Scripted) -> None:
    clients = Clients(scripted.live.url, asks("sentinel"), Ledger(), seed=1)

    async def ask() -> None:
        async with Wire(scripted.live.url, 120.0) as wire:
            await clients.ask(wire, clients._asks.next(exact=True))

    asyncio.run(ask())
    assert clients.ledger.wrong == []
    scripted.said = scripted.said.replace("5", "6")
    asyncio.run(ask())
    assert len(clients.ledger.wrong) == 1 and "sentinel" in clients.ledger.wrong[0]


def test_an_answer_that_breaks_its_schema_is_a_fault(scripted: Scripted) -> None:
    ledger, _ = soaked(scripted, 4, "schema")
    assert len(ledger.wrong) == sum(ledger.kinds.values()) and all("not JSON" in fault for fault in ledger.wrong)


def test_a_full_queue_is_a_refusal_and_no_fault(scripted: Scripted) -> None:
    scripted.engine.fault = RequestRefused("queue_full", "", "20 requests wait already")
    ledger, counted = soaked(scripted, 6, "chat", "completions")
    assert ledger.wrong == [] and ledger.disagreements(counted) == []
    assert ledger.refused["queue_full"].least == sum(ledger.kinds.values()) == ledger.statuses[429]


@pytest.mark.parametrize("api", list(PATHS))
def test_a_stream_reads_as_the_whole_reply_does(scripted: Scripted, api: Api) -> None:
    ledger = Ledger()
    clients = Clients(scripted.live.url, asks("chat"), ledger, seed=1)
    seen: list[Reply] = []
    clients._judge = lambda ask, reply: seen.append(reply)  # type: ignore[method-assign]
    drawn = {"chat": "chat", "completions": "completions", "messages": "messages", "responses": "responses"}[api]
    maker = Asks(TEXTS, seed=3)
    maker._sampling = dict  # type: ignore[method-assign,assignment]

    async def ask(stream: bool) -> None:
        made = maker._kinds[drawn][1](stream)
        body = {**json.loads(made.body), **({"max_output_tokens": 60} if api == "responses" else {"max_tokens": 60})}
        for field in (
            "logprobs",
            "echo",
            "stop",
            "tools",
            "tool_choice",
            "text",
            "top_logprobs",
            "reasoning",
            "thinking",
        ):
            body.pop(field, None)
        async with Wire(scripted.live.url, 120.0) as wire:
            await clients.ask(
                wire, type(made)(drawn, PATHS[api], json.dumps(body).encode(), api, stream, max_tokens=60)
            )

    asyncio.run(ask(False))
    asyncio.run(ask(True))
    assert ledger.wrong == [] and len(seen) == 2
    whole, streamed = seen
    assert "answer is 5" in whole.choice().text and whole.choices == streamed.choices
    assert whole.used and streamed.used and whole.used.completion == streamed.used.completion


def test_a_refusal_within_a_stream_counts_only_before_it_has_begun() -> None:
    told = {"error": {"type": "rate_limit_error", "message": "20 requests wait already"}}
    with pytest.raises(QueueFull):
        read_event("chat", Reply(), "", told)
    with pytest.raises(ReplyError):
        read_event("chat", Reply(choices={0: Choice("some text")}), "", told)


def test_growth_is_that_of_the_last_fifth_over_the_first() -> None:
    growth = Growth()
    for second in range(101):
        growth.note(second, 100.0 + (30 if 40 < second < 60 else 0) + second / 10)
    assert growth.mib(100) == pytest.approx(8.0)
