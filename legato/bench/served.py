"""A server in a process of its own, for a benchmark that watches it from outside.

Owns its start, the address in its ready line, its log, its processes and its end. Knows nothing of what is asked of it. Called by
`legato.bench.pareto`, `soak_http` and `server_cost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from legato.config import ConfigError

_ADDRESS = re.compile(rb"https?://[\w.:\[\]-]+")
READY_S = 300.0
STOP_S = 60.0


@dataclass(slots=True)
class Served:
    """A server that is ready.

    Attributes:
        url: as its ready line says.
        process: the server's own; the engine's is among `pids`.
        faults: lines of its log that a sound server does not write: errors, and what is no log line at all, such as a traceback.
        code: its exit code, once it has ended.
    """

    url: str
    process: asyncio.subprocess.Process
    faults: list[str] = field(default_factory=list[str])
    code: int | None = None

    @property
    def pids(self) -> list[int]:
        """The server's process, and those that it has started, in the order of their start."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found

    @property
    def num_files(self) -> int:
        """Files and connections that the server's process holds open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process's threads of now have used so far. Raises OSError where there is no such process."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


@contextlib.asynccontextmanager
async def serving(command: Sequence[str]) -> AsyncGenerator[Served]:
    """Starts a server whose stdout says its address and whose stderr is a log of JSON lines; ends it with SIGTERM.

    Raises:
        ConfigError: it ended, or said nothing for `READY_S`, instead of becoming ready.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    served = Served("", process)
    reading = asyncio.create_task(_read_log(process, served.faults))
    try:
        served.url = await _address(process)
        if not served.url:
            await reading
            raise ConfigError("the server did not start: " + "; ".join(served.faults)[-2000:])
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            served.code = await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            served.faults.append(f"the server had not ended {STOP_S:.0f} s after SIGTERM")
        await reading


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(READY_S):
        async for line in process.stdout:
            if (found := _ADDRESS.search(line)) is not None:
                return found.group().decode()
    return ""


async def _read_log(process: asyncio.subprocess.Process, faults: list[str]) -> None:
    assert process.stderr is not None
    async for raw in process.stderr:
        line = raw.decode("utf-8", "replace").rstrip()
        try:
            is_fault = json.loads(line)["level"] not in ("debug", "info", "warning")
        except (ValueError, KeyError, TypeError):
            is_fault = bool(line)
        if is_fault and len(faults) < 1000:
            faults.append(line[:2000])
