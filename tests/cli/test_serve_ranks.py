"""`legato serve --tp 2` as users start it, on the CPU: its answers are those of one rank, and the loss of a rank ends the server
in time, with 503 until then, the rank and the cause in its log, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import is_alive

pytestmark = pytest.mark.full


class Served:
    """A running server of two ranks."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        command = [sys.executable, "-m", "legato", "serve", "--port", port, "--threads", "1", "--device", "cpu"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--tp", "2", "--rank-patience", "2", "--context", "1024"],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        deadline = time.monotonic() + 180
        while self.ask("/health")[0] != 200:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and body of the answer; status 0 where there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def complete(self, max_tokens: int) -> tuple[int, str]:
        return self.ask(
            "/v1/completions", {"prompt": "def f(x):", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        )

    def family(self) -> list[int]:
        """Process ids of the server and everything below it."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(FileNotFoundError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found

    def rank(self) -> int:
        """Process id of rank 1."""
        words = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in self.family()}
        (found,) = [pid for pid, text in words.items() if "ranks.follow" in text]
        return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path)
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
    (engine,) = [pid for pid in family if "engine.process" in Path(f"/proc/{pid}/cmdline").read_text()]
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
