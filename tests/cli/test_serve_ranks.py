"""`legato serve --tp 2` as users start it, on the CPU: its answers are those of one rank, and the loss of a rank ends the server
in time, with 503 until then, the rank and the cause in its log, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.served_ranks import Served
from tests.processes import find, is_alive

pytestmark = pytest.mark.full


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path, "cpu")
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "rank 1 is lost: killed by SIGKILL"), (signal.SIGSTOP, "rank 1 hangs: no sign of life")],
    ids=["killed", "stopped"],
)
def test_the_loss_of_a_rank_ends_the_server(served: Served, number: int, words: str) -> None:
    status, body = served.complete(16)
    assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 16
    family = served.family()
    os.kill(served.rank(), number)
    hurt, statuses = time.monotonic(), []
    while served.process.poll() is None:
        statuses.append(served.complete(200)[0])
        assert time.monotonic() - hurt < 10, (statuses, served.log.read_text())
        time.sleep(0.05)
    assert time.monotonic() - hurt < 7  # five, and a machine that others use
    assert served.process.returncode == 1
    assert set(statuses) <= {500, 503, 0} and 503 in statuses, statuses
    assert words in served.log.read_text()
    assert not [pid for pid in family if is_alive(pid)]


def test_rank_0_may_hang_too(served: Served) -> None:
    family = served.family()
    engine = find(family, "engine.process")
    os.kill(engine, signal.SIGSTOP)
    hurt = time.monotonic()
    assert served.process.wait(20) == 1
    assert time.monotonic() - hurt < 7
    log = served.log.read_text()
    assert "rank 0 hangs: no sign of life" in log and "SIGKILL" in log
    for _ in range(300):
        if not [pid for pid in family if is_alive(pid)]:
            return
        time.sleep(0.01)
    raise AssertionError("a process has outlived the server")


def test_nothing_is_left_after_an_orderly_end(served: Served) -> None:
    assert "on cpu, 2 ranks, context 1024" in served.log.read_text()
    family = served.family()
    assert served.rank() in family and len(family) >= 3
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    for _ in range(300):
        if not [pid for pid in family if is_alive(pid)]:
            return
        time.sleep(0.01)
    raise AssertionError("a process has outlived the server")
