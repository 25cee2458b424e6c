"""The client and a real process around a toy device: what is asked comes, ends once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legato.engine.messages import Report
from legato.server.engine.client import CommandFailed, EngineClient, EngineFailed, GenerationRequest, RequestRefused
from legato.types import SamplingParams
from tests.engine import standin
from tests.engine.standin import (
    CONTEXT,
    DRAFTS,
    ROOMY,
    at_work,
    endless,
    expected,
    long,
    request,
    run,
    running,
    settings,
    tokens_of,
)


def is_empty(report: Report) -> bool:
    """Nothing runs, nothing waits, every end was reported, and every page is free or cached."""
    is_idle = not (report.running or report.waiting or report.used_pages)
    is_told = report.counters.submitted == sum(report.counters.finished.values())
    return is_idle and is_told and report.total_pages == report.free_pages + report.cached_pages


async def emptied(client: EngineClient) -> Report:
    """The first report of an engine that holds nothing."""
    while not is_empty(report := await client.report()):
        await asyncio.sleep(0.005)
    return report


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_many_at_once_in_a_pool_of_little_more_than_one(overlap: str) -> None:
    config = settings(tokens=64, max_running=4)  # one context is 52
    config = replace(config, execution=replace(config.execution, overlap=overlap))
    asked = [request((n % 3, 1, n % 2), max_tokens=25 + n, seed=n) for n in range(24)]

    async def test() -> None:
        async with running(config) as client:
            answers = await asyncio.gather(*(tokens_of(client, one) for one in asked))
            for one, (tokens, reason) in zip(asked, answers, strict=True):
                assert tokens == expected(one)
                assert reason == ("stop" if tokens[-1] == 99 else "length")
            report = await emptied(client)
            counters = report.counters
            assert counters.preemptions > 0
            assert counters.submitted == sum(counters.finished.values()) == 24
            assert set(counters.finished) <= {"stop", "length"}
            assert counters.generated_tokens == sum(len(tokens) for tokens, _ in answers)
            assert counters.drafted_tokens == DRAFTS * counters.decode_rounds >= counters.accepted_tokens > 0

    run(test())


def test_leaving_early_ends_the_request_within_an_iteration() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            async with aclosing(client.generate(endless())) as gains:
                async for gained in gains:
                    assert gained.finish_reason is None
                    break
            left = (await client.report()).counters.iterations  # the engine reads messages in their order
            report = await emptied(client)
            assert report.counters.iterations <= left + 1
            assert report.counters.finished == {"abort": 1}

    run(test())


def test_a_cancelled_reader_ends_its_request() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            reader = asyncio.create_task(tokens_of(client, endless()))
            await at_work(client)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert (await emptied(client)).counters.finished == {"abort": 1}

    run(test())


def test_abort_by_name_and_of_all() -> None:
    async def test() -> None:
        async with running(settings(0.03, **ROOMY)) as client:
            asked = [endless(n + 1, id=f"r{n}") for n in range(3)]
            readers = [asyncio.create_task(tokens_of(client, one)) for one in asked]
            await at_work(client, 3)
            await client.abort("r1")
            await client.abort("never heard of")
            tokens, reason = await readers[1]
            assert reason == "abort"
            assert all(said == due for said, due in zip(tokens, expected(asked[1])))
            assert not readers[0].done() and not readers[2].done()
            await client.abort()
            assert [(await reader)[1] for reader in readers] == ["abort"] * 3

    run(test())


def test_storm_of_aborts() -> None:
    """Requests that are left at once, after some tokens, or at the end, while others run: everything comes back."""

    async def visit(client: EngineClient, n: int) -> None:
        asked = request((n % 3, 2, 1), seed=n, max_tokens=30)
        taken: list[int] = []
        async with aclosing(client.generate(asked)) as gains:
            task = asyncio.ensure_future(anext(gains))
            await asyncio.sleep(0 if n % 3 else 0.01)
            if n % 2:
                task.cancel()
                await asyncio.wait([task])
                return
            taken += (await task).tokens
            for _ in range(n % 5):
                async for gained in gains:
                    taken += gained.tokens
                    break
        assert taken == expected(asked)[: len(taken)]

    async def test() -> None:
        async with running(settings(0.005, tokens=100, max_running=4)) as client:
            calm = [request((0, 0, n), seed=1000 + n, max_tokens=30) for n in range(3)]
            others = [asyncio.create_task(tokens_of(client, one)) for one in calm]
            await asyncio.gather(*(visit(client, n) for n in range(400)))
            for one, task in zip(calm, others, strict=True):
                assert (await task)[0] == expected(one)
            report = await emptied(client)
            assert report.counters.finished["abort"] >= 100
            assert not client._open and not client._leaving
            assert (await tokens_of(client, request(seed=7)))[0] == expected(request(seed=7))

    run(test())


def test_deadlines_count_from_the_arrival() -> None:
    async def test() -> None:
        async with running(settings(0.05)) as client:
            tokens, reason = await tokens_of(client, long(timeout_s=0.2))
            assert reason == "deadline" and len(tokens) < CONTEXT - 3
            assert (await tokens_of(client, long(timeout_s=0.0)))[1] == "deadline"
            assert (await tokens_of(client, long(timeout_s=60.0)))[1] == "length"
            assert (await client.report()).counters.finished == {"deadline": 2, "length": 1}

    run(test())


def test_the_more_important_go_first() -> None:
    async def test() -> None:
        async with running(settings(0.02, max_running=1, **ROOMY)) as client:
            order: list[int] = []

            async def ask(priority: int) -> None:
                await tokens_of(client, request(priority=priority, max_tokens=6))
                order.append(priority)

            first = asyncio.create_task(tokens_of(client, endless(id="first")))
            await at_work(client)
            others = [asyncio.create_task(ask(priority)) for priority in (-1, 0, 3)]
            while (await client.report()).waiting < 3:
                await asyncio.sleep(0.01)
            await client.abort("first")
            await asyncio.gather(first, *others)
            assert order == [3, 0, -1]

    run(test())


SHORT = SamplingParams(max_tokens=4)
REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "n": ({"params": replace(SHORT, n=2)}, "invalid", "n", "must be 1"),
    "no prompt": ({"prompt": ()}, "invalid", "prompt", "no tokens"),
    "id beyond": ({"prompt": (1, 1000)}, "invalid", "prompt", "token 1 is 1000; the vocabulary has 1000"),
    "negative id": ({"prompt": (-1,)}, "invalid", "prompt", "token 0 is -1"),
    "no id": ({"prompt": (1, "2")}, "invalid", "prompt", "int"),
    "a float": ({"prompt": (1, 2.5)}, "invalid", "prompt", "int"),
    "stop beyond": ({"stop_ids": (4000,)}, "invalid", "stop_ids", "4000"),
    "many stops": ({"stop_ids": tuple(range(17))}, "invalid", "stop_ids", "at most 16"),
    "seed": ({"seed": 2**63}, "invalid", "seed", "2^63"),
    "time": ({"timeout_s": float("nan")}, "invalid", "timeout_s", "nan"),
    "priority": ({"priority": "high"}, "invalid", "priority", "expected `int`, got `str`"),
    "large priority": ({"priority": 2**70}, "invalid", "priority", "64 bits"),
    "salt": ({"cache_salt": "\ud800"}, "invalid", "", "surrogates"),
    "drafts": ({"num_drafts": 8}, "invalid", "num_drafts", "must be between 0 and 7"),
    "wrong type": ({"params": replace(SHORT, ignore_eos="yes")}, "invalid", "ignore_eos", "expected `bool`"),
    "huge limit": ({"params": SamplingParams(max_tokens=10**30)}, "invalid", "max_tokens", "64 bits"),
    "long prompt": ({"prompt": (1,) * 52}, "never_fits", "prompt", "52 tokens > 51 maximum"),
    "long answer": ({"params": SamplingParams(max_tokens=50)}, "never_fits", "max_tokens", "max_tokens is 50"),
    "reserved id": ({"id": "replay of me"}, "invalid", "id", "replay of me"),
    "a fault in a check": ({"params": replace(SHORT, grammar=standin.OUTGROWS)}, "invalid", "grammar", "ZeroDivision"),
}  # fmt: skip


def test_refusals_name_the_field_and_harm_nobody() -> None:
    async def test() -> None:
        async with running() as client:
            for name, (fields, kind, field, text) in REFUSED.items():
                values = {"prompt": (1, 2, 0), "params": SHORT, "seed": 3, **fields}
                with pytest.raises(RequestRefused) as refused:
                    await tokens_of(client, GenerationRequest(**values))
                assert (refused.value.kind, refused.value.field) == (kind, field), name
                assert text in str(refused.value), name
                assert await tokens_of(client, request()) == (expected(request()), "length"), name
            counters = (await client.report()).counters
            assert counters.refused["never_fits"] == 2
            assert counters.submitted == len(REFUSED)
            assert client.state == "ready"

    run(test())


def test_a_full_queue_refuses_and_recovers() -> None:
    async def test() -> None:
        async with running(settings(0.02, max_running=1, max_waiting=2)) as client:
            readers = [asyncio.create_task(tokens_of(client, request(seed=n))) for n in range(5)]
            done = await asyncio.gather(*readers, return_exceptions=True)
            refused = [error for error in done if isinstance(error, RequestRefused)]
            assert refused and all(error.kind == "queue_full" for error in refused)
            assert len(refused) + sum(isinstance(one, tuple) for one in done) == 5
            assert (await tokens_of(client, request()))[1] == "length"
            assert (await client.report()).counters.refused == {"queue_full": len(refused)}

    run(test())


def test_a_name_is_free_again_when_its_request_has_ended() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            async with aclosing(client.generate(endless(id="mine"))) as gains:
                await anext(gains)
                with pytest.raises(RequestRefused, match="in use") as refused:
                    await tokens_of(client, request(id="mine"))
                assert refused.value.field == "id"
            while client._leaving:
                await asyncio.sleep(0.01)
            answer = await tokens_of(client, request(id="mine"))
            assert answer == (expected(request()), "length")  # not the end of the one before

    run(test())


def test_an_iterator_that_is_never_read_sends_nothing() -> None:
    async def test() -> None:
        async with running() as client:
            await client.generate(request()).aclose()
            assert (await client.report()).counters.submitted == 0

    run(test())


def test_commands() -> None:
    async def test() -> None:
        async with running() as client:
            await tokens_of(client, long())
            report = await client.report()
            assert report.cached_pages > 0 and report.median_iteration_seconds > 0
            assert await client.flush_cache() == report.cached_pages
            assert (await client.report()).cached_pages == 0
            before = (await client.report()).counters
            await client.reset_stats()
            report = await client.report()
            assert report.stats.iterations == 0 and report.counters == before
            await tokens_of(client, long(2))
            after = (await client.report()).counters
            assert after.generated_tokens == before.generated_tokens + CONTEXT - 3
            assert after.iterations == before.iterations + (await client.report()).stats.iterations
            with pytest.raises(CommandFailed, match="nothing to record"):
                await client.start_profile("/nowhere")
            assert client.state == "ready"

    run(test())


def test_reports_come_by_themselves() -> None:
    async def test() -> None:
        async with running(settings(0.1, **ROOMY)) as client:
            reader = asyncio.create_task(tokens_of(client, endless()))
            await at_work(client)
            first = client.last_report
            while client.last_report.counters.iterations <= first.counters.iterations:
                await asyncio.sleep(0.02)
            assert client.last_report.iteration_seconds >= 0.1
            await client.abort()
            await reader
            while not is_empty(client.last_report):
                await asyncio.sleep(0.02)
            idle = client.last_report
            while client.last_report is idle:
                await asyncio.sleep(0.02)

    run(test())


def test_drain_lets_running_requests_finish() -> None:
    async def test() -> None:
        async with running(settings(0.02)) as client:
            reader = asyncio.create_task(tokens_of(client, long()))
            while not client._open:
                await asyncio.sleep(0)
            drained = asyncio.create_task(client.drain(30.0))
            await asyncio.sleep(0)
            assert client.state == "draining"
            with pytest.raises(RequestRefused) as refused:
                await tokens_of(client, request())
            assert refused.value.kind == "draining"
            assert await drained == 0
            assert await reader == (expected(long()), "length")
            await client.close()
            await client.close()
            assert client.state == "closed" and client.failure is None and not client.failed.is_set()
            assert client._child.exited.result() == 0
            with pytest.raises(EngineFailed, match="closed"):
                await tokens_of(client, request())

    run(test())


def test_drain_ends_what_takes_too_long() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            reader = asyncio.create_task(tokens_of(client, endless()))
            await at_work(client)
            assert await client.drain(0.1) == 1
            assert (await reader)[1] == "abort"

    run(test())


def test_closing_fails_what_is_open() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            reader = asyncio.create_task(tokens_of(client, endless()))
            await at_work(client)
            await client.close()
            with pytest.raises(EngineFailed, match="closed"):
                await reader
            assert client._child.exited.result() == 0

    run(test())


def test_a_grammar_that_takes_long_to_compile_holds_up_nobody_else(tmp_path: Path) -> None:
    """The others' tokens go on coming meanwhile; one who leaves meanwhile is forgotten, and the next one does not wait for it."""

    async def test() -> None:
        async with running(settings(0.02)) as client:
            slowly = SamplingParams(max_tokens=9, grammar=f"{standin.SLOW}{tmp_path / 'compiled'}")
            slow = asyncio.create_task(tokens_of(client, request(params=slowly)))
            await asyncio.sleep(0)
            leaver = asyncio.create_task(tokens_of(client, request(params=slowly, id="b")))
            await asyncio.sleep(0.05)
            leaver.cancel()
            _, reason = await tokens_of(client, request(max_tokens=5, id="c"))
            assert reason in ("length", "stop") and not slow.done()
            (tmp_path / "compiled").touch()
            assert (await slow)[1] in ("length", "stop")
            assert (await emptied(client)).counters.submitted == 2

    run(test())
