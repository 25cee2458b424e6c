"""The engine's process as its parent sees it: how it is started, how it is ended, and how it came to its end.

Owns the process and the parent's end of the socket. Knows nothing of messages. Called by `server.engine.client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from legato.engine.process import main; main()"
"""With the parent's own module path: the working directory may hold anything, a folder named `torch` among it."""

STDERR = 2


class Child:
    """A running process. Make it with `spawn`, in the event loop's own thread: the process ends when the thread does.

    Attributes:
        sock: the parent's end.
        exited: done when the process is gone and reaped, with its exit code (negative: the signal that killed it).
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._process, self.sock = process, sock
        self.exited: asyncio.Future[int] = loop.create_future()
        # A thread, and not the loop's own watching of children: it works in every loop, and reaps when the loop has ended.
        threading.Thread(target=self._reap, args=(loop,), name="engine-exit", daemon=True).start()

    @classmethod
    def spawn(cls, target: str) -> Child:
        """Starts a process that serves what `target` (`module:function`) builds. It inherits stderr, and writes there alone.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), target]
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", BOOT, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                    start_new_session=True,  # Ctrl-C in the terminal is for the parent
                )
            except OSError:
                ours.close()
                raise
        return cls(process, ours, asyncio.get_running_loop())

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Ends it now, if it has not ended."""
        self._process.kill()

    async def wait(self, timeout_s: float) -> None:
        """Waits for its end, and ends it when the time is up."""
        await asyncio.wait([self.exited], timeout=timeout_s)
        if not self.exited.done():
            self.kill()
            await asyncio.wait([self.exited])

    def ending(self) -> str:
        """How it ended, in words."""
        if not self.exited.done():
            return "closed its connection"
        code = self.exited.result()
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed first: nobody asks any more
            loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)
