"""One `legato serve` with the checkpoint of the package, for the clients of other projects."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

COMMAND = (
    "-m",
    "legato",
    "serve",
    "--port",
    "0",
    "--served-model-name",
    "small",
    "--context",
    "2048",
    "--max-running",
    "8",
)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Its URL. At the end it must have logged no error, and leave with 0."""
    process = subprocess.Popen([sys.executable, *COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
    reader.start()
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "".join(log)
        yield found.group()
    finally:
        process.terminate()
        code = process.wait(60)
        reader.join(10)
    assert code == 0 and not [line for line in log if " error:" in line or "Traceback" in line], "".join(log)
