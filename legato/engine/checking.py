"""Requests whose grammar is being compiled, beside the loop: a grammar may take seconds, and the others' iterations go on.

Owns the thread that checks and who waits for it. Knows neither messages nor the scheduler. Called by `engine.serving`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from legato.schedule import Request


class Checking:
    """Checks one request after the other with `check`, which raises what is wrong with a request."""

    def __init__(self, check: Callable[[Request], None]) -> None:
        self._check = check
        self._threads = ThreadPoolExecutor(1, "grammar")
        self._open: dict[str, tuple[Request, Future[None]]] = {}

    def __bool__(self) -> bool:
        """Whether anyone waits."""
        return bool(self._open)

    def begin(self, request: Request) -> None:
        """Has a request checked."""
        self._open[request.id] = (request, self._threads.submit(self._check, request))

    def drop(self, id: str) -> bool:
        """Forgets a request; returns whether it was waiting here."""
        found = self._open.pop(id, None)
        if found is not None:
            found[1].cancel()
        return found is not None

    def done(self) -> list[tuple[Request, BaseException | None]]:
        """Those that have been checked since the last call, in the order in which they came, each with what is wrong with it."""
        ready = [(request, future.exception()) for request, future in self._open.values() if future.done()]
        for request, _ in ready:
            del self._open[request.id]
        return ready

    def close(self) -> None:
        """Begins nothing more; what is being compiled is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
