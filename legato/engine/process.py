"""The engine's process, from its first line to its exit code: builds an engine, serves it, and leaves when anything is wrong.

Imports no torch itself, so that whatever fails while the engine is built reaches the other side as a message. Started by
`server.engine.client`; what it builds is named on its command line.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from typing import NoReturn, cast

import msgspec

import legato.engine.messages as messages
from legato.engine.bond import die_with
from legato.engine.channel import Channel, Disconnected
from legato.engine.ranks.watch import RankLost
from legato.engine.serving import IDLE_REPORT_S, Assemble, Serving

LOG = logging.getLogger(__name__)

PROGRESS_S = 0.1
"""Between two messages about loading."""


def serve(channel: Channel, target: str) -> int:
    """Builds what `target` (`module:function`) names and serves it. Returns the exit code of the process.

    0: it was told to stop. 1: anything else; the reason has been sent, if there is still someone to send it to, and logged.
    """
    started = time.perf_counter()
    try:
        start = _first(channel)
        logging.basicConfig(level=start.log_level, format="engine: %(levelname)s %(name)s: %(message)s")
        channel.send(messages.Loading("importing"))
        module, _, name = target.partition(":")
        assemble = cast(Assemble, getattr(importlib.import_module(module), name))
        served = assemble(start.config, _Announcing(channel))
        info = msgspec.structs.replace(served.info, load_seconds=time.perf_counter() - started)
        # What was built lives as long as the process: the collector need not look at it between two iterations.
        gc.collect()
        gc.freeze()
        if served.watch is not None:
            served.watch.guard(lambda lost: _leave(channel, lost))
        channel.send(messages.Ready(info))
        Serving(channel, served).run()
        if served.watch is not None:
            served.watch.close()
    except Disconnected:
        LOG.error("the server's process is gone; so is the engine's")
        return 1
    except Exception as error:
        _report_failure(channel, error)
        return 1
    return 0


def _first(channel: Channel) -> messages.Start:
    while True:
        for message in channel.receive(IDLE_REPORT_S):
            if not isinstance(message, messages.Start):
                raise messages.MessageError(f"the first message is {type(message).__name__}, not Start")
            return message


class _Announcing:
    """Loading, told to the other side: not every tensor of it."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._last = channel, 0.0

    def __call__(self, done_bytes: int, total_bytes: int, label: str) -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_S or done_bytes == total_bytes:
            self._last = now
            self._channel.send(messages.Loading(label, done_bytes, total_bytes))


def _leave(channel: Channel, error: Exception) -> NoReturn:
    """The engine's own thread waits for what will never come, so that it cannot say so: a device, or a rank that is lost."""
    _report_failure(channel, error)
    os._exit(1)


def _report_failure(channel: Channel, error: Exception) -> None:
    """Errors with a message for users are told as they are; any other one with its type, and its traceback goes to the log."""
    name = type(error).__name__
    is_for_users = isinstance(error, ValueError | RankLost) and type(error).__module__.startswith("legato.")
    if is_for_users and not isinstance(error, messages.MessageError):
        reason = str(error)
    else:
        reason = f"{name}: {error}"
        LOG.critical("the engine failed", exc_info=error)
    try:
        channel.send(messages.Failed(reason, name))
    except Disconnected:
        LOG.error("nobody is there to be told: %s", reason)


def main() -> NoReturn:
    """The process: `python -c ... SOCKET PARENT MODULE:FUNCTION`, the socket by its inherited number."""
    descriptor, parent, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with(parent)
    # The parent decides when it is over; a terminal or a service manager signals both of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    os.set_inheritable(descriptor, False)
    code = serve(Channel(socket.socket(fileno=descriptor)), target)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: after a fault of a device its libraries may wait for ever.
    os._exit(code)
