"""`legato serve --tp 2` as users start it, its family of processes, and requests to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.processes import family_of, find


class Served:
    """A running server of two ranks."""

    def __init__(self, folder: Path, device: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        command = [sys.executable, "-m", "legato", "serve", "--port", port, "--threads", "1", "--device", device]
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
        return family_of(self.process.pid)

    def rank(self) -> int:
        """Process id of rank 1."""
        return find(self.family(), "ranks.follow")
