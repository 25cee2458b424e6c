"""Faults on either side of the border: every one is seen in time, everyone who waits is told why, and no process stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from legato.server.engine.client import GRACE_S, EngineClient, EngineFailed
from legato.types import SamplingParams
from tests.engine import standin
from tests.engine.standin import (
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
from tests.processes import children_of, is_alive

ROOT = Path(__file__).resolve().parents[2]
SEEN_S = 20.0
"""A crash or a kill is seen within this time on any machine: without being seen, nothing would be told for a minute."""
STALL_S = 2.0
"""Far more than between two signs of life of an engine that is `talkative`."""


async def working(client: EngineClient, count: int = 3) -> list[asyncio.Task[tuple[list[int], str]]]:
    """That many requests, all of which run."""
    readers = [asyncio.create_task(tokens_of(client, endless(n + 1))) for n in range(count)]
    await at_work(client, count)
    return readers


async def all_fail(
    client: EngineClient, readers: list[asyncio.Task[tuple[list[int], str]]], match: str, within_s: float
) -> None:
    """Every reader gets the error in time, the client says the same, and the process is gone."""
    started = time.monotonic()
    ends = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), within_s)
    for end in ends:
        assert isinstance(end, EngineFailed) and match in str(end)
    assert client.failed.is_set() and client.state == "failed" and match in client.failure
    with pytest.raises(EngineFailed, match=match):
        await tokens_of(client, request())
    with pytest.raises(EngineFailed, match=match):
        await client.report()
    while not client._child.exited.done():
        assert time.monotonic() - started < within_s + GRACE_S
        await asyncio.sleep(0.01)
    assert client._child.exited.result() != 0
    assert not is_alive(client.pid)


def test_engine_killed() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            readers = await working(client)
            os.kill(client.pid, signal.SIGKILL)
            await all_fail(client, readers, "was killed by SIGKILL", SEEN_S)
            assert await client.drain(5.0) == 0

    run(test())


def test_engine_killed_while_idle() -> None:
    async def test() -> None:
        async with running() as client:
            os.kill(client.pid, signal.SIGKILL)
            await asyncio.wait_for(client.failed.wait(), SEEN_S)
            await all_fail(client, [], "was killed by SIGKILL", SEEN_S)

    run(test())


@pytest.mark.parametrize("work", [True, False])
def test_engine_frozen(work: bool) -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY), stall_s=STALL_S, kind="talkative") as client:
            readers = await working(client) if work else []
            await asyncio.sleep(0 if work else STALL_S / 2)
            assert client.state == "ready"
            os.kill(client.pid, signal.SIGSTOP)
            await asyncio.wait_for(client.failed.wait(), STALL_S + SEEN_S)
            await all_fail(client, readers, "nothing was heard of it", SEEN_S)

    run(test())


def test_a_turn_that_never_ends() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY), stall_s=STALL_S, kind="talkative") as client:
            readers = await working(client, 2)
            readers.append(asyncio.create_task(tokens_of(client, request((standin.SLEEPS, 1)))))
            await all_fail(client, readers, "stalled", STALL_S + SEEN_S)

    run(test())


def test_turns_that_bring_nobody_further() -> None:
    """The process is alive and says so, and yet nothing happens."""

    async def test() -> None:
        async with running(stall_s=1.0, kind="livelocked") as client:
            readers = [asyncio.create_task(tokens_of(client, request(seed=n))) for n in range(2)]
            await all_fail(client, readers, "none of 2 open requests moved", 1.0 + SEEN_S)

    run(test())


def test_long_work_is_no_stall() -> None:
    """No token for longer than the limit, but one chunk of a prompt after the other; then nothing to do for as long."""

    async def test() -> None:
        async with running(settings(0.1, chunk_tokens=1), stall_s=STALL_S, kind="talkative") as client:
            asked = request(tuple(n % 3 for n in range(24)), max_tokens=3)
            started = time.monotonic()
            async for gained in client.generate(asked):
                assert not gained.tokens or time.monotonic() - started > STALL_S
            await asyncio.sleep(1.2 * STALL_S)
            assert client.state == "ready"

    run(test())


def test_a_grammar_that_takes_long_to_compile_is_no_stall(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(settings(0.02), stall_s=STALL_S, kind="talkative") as client:
            asked = request(params=SamplingParams(max_tokens=4, grammar=f"{standin.SLOW}{tmp_path / 'compiled'}"))
            reader = asyncio.create_task(tokens_of(client, asked))
            await asyncio.sleep(1.2 * STALL_S)
            assert client.state == "ready" and not reader.done()
            (tmp_path / "compiled").touch()
            assert (await reader)[1] in ("length", "stop")
            assert client.state == "ready"

    run(test())


def test_a_blocked_event_loop_is_not_the_engines_fault() -> None:
    async def test() -> None:
        async with running(settings(0.02), stall_s=STALL_S, kind="talkative") as client:
            reader = asyncio.create_task(tokens_of(client, long()))
            await asyncio.sleep(0.1)
            os.kill(client.pid, signal.SIGSTOP)
            time.sleep(1.3 * STALL_S)  # as a suspended machine would, for both of us
            os.kill(client.pid, signal.SIGCONT)
            assert (await reader)[0] == expected(long())
            assert client.state == "ready"

    run(test())


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_exception_in_a_step(overlap: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The memory of the device may hold anything now: all that is open fails, those that wait too, and the process ends."""
    config = settings(0.05, max_running=2, **ROOMY)
    config = replace(config, execution=replace(config.execution, overlap=overlap))

    async def test() -> None:
        async with running(config) as client:
            readers = await working(client, 2)
            bad = request((1, standin.RAISES), priority=1)
            waiting = [asyncio.create_task(tokens_of(client, one)) for one in (bad, endless(3), endless(4))]
            await asyncio.sleep(0.1)
            assert client.state == "ready"  # the bad one has no row yet
            await client.abort(next(iter(client._open)))
            await asyncio.wait(readers[:1])  # aborted, or failed if its end was to be told in the turn that broke
            await all_fail(client, [readers[1], *waiting], "MemoryError: out of memory on the device", SEEN_S)
            assert client._child.exited.result() == 1

    run(test())
    assert "in launch" in capfd.readouterr().err


def test_a_crash_in_a_step_leaves_its_place_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            readers = await working(client, 2)
            readers.append(asyncio.create_task(tokens_of(client, request((standin.CRASHES,)))))
            await all_fail(client, readers, "was killed by SIGSEGV", SEEN_S)

    run(test())
    text = capfd.readouterr().err
    assert "Segmentation fault" in text and "in launch" in text


def test_the_engine_reads_what_is_no_message() -> None:
    async def test() -> None:
        async with running(settings(0.05, **ROOMY)) as client:
            readers = await working(client, 2)
            client._write(b"\0\0\0\3abc")
            await all_fail(client, readers, "MessageError: a frame of 3 bytes is no message", SEEN_S)
            assert client._child.exited.result() == 1

    run(test())


def test_the_engine_writes_what_is_no_message() -> None:
    with pytest.raises(EngineFailed, match="does not speak the protocol: a frame of 5 bytes"):
        run(start("babbling"))


async def start(kind: str, module: str = standin.__name__) -> None:
    await EngineClient.start(settings(), engine=f"{module}:{kind}")


@pytest.mark.parametrize(
    ("kind", "message", "error"),
    [
        ("misconfigured", "context 9 is longer than the 8 tokens the checkpoint states", "ConfigError"),
        ("loading_raises", "KeyError: 'model.layers.3'", "KeyError"),
        ("loading_exits", "the engine's process ended with exit code 3", ""),
        ("not_there", "AttributeError: module 'tests.engine.standin' has no attribute 'not_there'", "AttributeError"),
    ],
)
def test_a_start_that_fails_says_why(kind: str, message: str, error: str) -> None:
    with pytest.raises(EngineFailed) as failed:
        run(start(kind))
    assert str(failed.value) == message
    assert failed.value.error == error


def test_a_broken_installation_says_so() -> None:
    with pytest.raises(EngineFailed, match=r"ModuleNotFoundError: No module named 'tests\.engine\.missing'"):
        run(start("assemble", "tests.engine.missing"))


def test_a_start_that_is_given_up_leaves_no_process() -> None:
    async def test() -> None:
        others = set(children_of(os.getpid()))  # of other tests in this process
        task = asyncio.create_task(start("loading_forever"))
        children: set[int] = set()
        while not children:
            await asyncio.sleep(0.05)
            children = set(children_of(os.getpid())) - others
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(is_alive(child) for child in children)

    run(test())


SERVER = """
import asyncio, signal, sys
from legato.types import SamplingParams
from tests.engine import standin
from legato.server.engine.client import EngineClient, GenerationRequest

async def main():
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    starting = asyncio.create_task(
        EngineClient.start(standin.settings(0.05), engine=f"tests.engine.standin:{sys.argv[1]}")
    )
    if sys.argv[1] != "assemble":
        await asyncio.sleep(3600)
    client = await starting
    prompt = (standin.SLEEPS,) if sys.argv[2] == "asleep" else (1, 2, 0)
    reader = asyncio.create_task(standin.tokens_of(client, standin.long(prompt=prompt)))
    await asyncio.sleep(0.3)
    print(client.pid, flush=True)
    await stop.wait()
    cut = await client.drain(60)
    tokens, reason = await reader
    await client.close()
    print(cut, reason, tokens == standin.expected(standin.long(prompt=prompt)), client.state, flush=True)

asyncio.run(main())
"""


def server(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the closed socket tells, between two turns")
@pytest.mark.parametrize(("kind", "how"), [("assemble", "asleep"), ("loading_forever", "")])
def test_server_killed(kind: str, how: str) -> None:
    with server(kind, how) as parent:
        if kind == "assemble":
            child = int(parent.stdout.readline())
        else:
            while not (children := children_of(parent.pid)):
                assert parent.poll() is None
                time.sleep(0.02)
            child = children[0]
            time.sleep(1.0)  # it has asked to die with its parent by now
        assert is_alive(child)
        parent.kill()
        killed = time.monotonic()
        while is_alive(child):
            assert time.monotonic() - killed < SEEN_S
            time.sleep(0.01)


def test_signals_are_for_the_server() -> None:
    """Ctrl-C goes to a whole process group, and a service manager signals every process: the running request still finishes."""
    with server("assemble", "awake") as parent:
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGINT)
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline().split() == ["0", "length", "True", "closed"]
        assert parent.wait(60) == 0
        assert not is_alive(child)
