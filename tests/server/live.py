"""A server on a port of its own, in a thread: what a real client connects to."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from legato.server.http.protocol import protocol


class Live:
    """Serves what `start` gives, in a thread with its own event loop, until `close`.

    `start` runs in that loop and returns the application and what to do at the end. `patience_s`: for headers, and for a
    connection that says nothing.
    """

    def __init__(
        self, start: Callable[[], Awaitable[tuple[Any, Callable[[], Awaitable[None]]]]], patience_s: float = 30.0
    ) -> None:
        self._start, self._patience_s = start, patience_s
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(120)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            app, end = await self._start()
        except BaseException as error:
            self._error = error
            self._ready.set()
            return
        config = uvicorn.Config(
            app,
            http=protocol(64 * 1024, self._patience_s),
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=self._patience_s,  # type: ignore[arg-type]
        )
        self.server = uvicorn.Server(config)
        serving = asyncio.create_task(self.server.serve(sockets=[self._sock]))
        while not self.server.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving
        await end()

    def call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Runs something in the server's loop."""

        async def run() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
