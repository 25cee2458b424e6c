"""The process of a rank other than 0: joins, then carries out every plan that rank 0 has written, until rank 0 ends it.

Owns the process from its first line to its exit code. Decides nothing. Started by `lead`.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn, cast

from legato.config import Config, ConfigError, RankAddress
from legato.engine.bond import die_with
from legato.engine.ranks.board import Board, Signs
from legato.engine.ranks.join import HOST, NOTHING_BROUGHT, START_S, Joined, Prepare, digest_of, join
from legato.engine.start import open_checkpoint
from legato.parallel.meeting import StoreMeeting
from legato.plan import Plan

if TYPE_CHECKING:
    from legato.runtime.runner import Flight, Runner

LOG = logging.getLogger(__name__)

GRAMMARS = ("legato.assembly", "grammars_of")
"""What makes grammars for a checkpoint's tokenizer: the text side is not known here."""
BEAT_S = 0.1
BUSY_S, BUSY_PAUSE_S, IDLE_PAUSE_S = 0.02, 0.00005, 0.001
"""A rank looks often for the next plan while plans come, and seldom once none has come for `BUSY_S`."""
LEAD_SILENT_S = 30.0
"""Rank 0's death ends this process at once. A rank 0 that stands still is ended where a server waits for it (`Board.guard`);
another one may have been suspended by its user, and is only left, after this time."""


class Closed(Exception):
    """Rank 0 needs this rank no more."""


class Follower:
    """One rank: the plans it has taken, and the flight that is in the air."""

    def __init__(self, rank: int, board: Board, joined: Joined) -> None:
        self._rank, self._board, self._joined = rank, board, joined
        self._overlap = joined.loaded.settings.overlap
        self._signs = board.signs(rank)
        self._number, self._busy_until = 0, 0.0
        self._flight: tuple[int, Flight] | None = None
        self._brought = NOTHING_BROUGHT

    def run(self) -> NoReturn:
        """Carries out plans until rank 0 needs no more: then raises Closed. Raises whatever a plan raises."""
        while True:
            plan = cast(Plan, pickle.loads(self._board.take(self._rank, self._pause)))
            self._number += 1
            flight = self._joined.runner.launch(plan)
            self._settle()
            self._flight = (self._number, flight)
            if not self._overlap:
                self._settle()
            self._busy_until = time.monotonic() + BUSY_S

    def _settle(self) -> None:
        """Brings in what is in the air: as rank 0 does, one launch later."""
        if self._flight is not None:
            number, flight = self._flight
            self._flight = None
            self._brought = digest_of(self._brought, flight.outcome())
            self._signs.settle(number, self._brought)
            self._joined.check()

    def _pause(self) -> None:
        if self._board.is_closed:
            raise Closed
        if self._flight is not None and time.monotonic() > self._busy_until:
            self._settle()
        time.sleep(BUSY_PAUSE_S if time.monotonic() < self._busy_until else IDLE_PAUSE_S)


def prepared_by(config: Config) -> Prepare:
    """Gives a runner the grammars of its checkpoint's tokenizer before any request needs one: the others would wait for it."""

    def prepare(runner: Runner) -> None:
        module, name = GRAMMARS
        runner.grammars = getattr(importlib.import_module(module), name)(config)

    return prepare


def live(board: Board, rank: int, patience_s: float) -> None:
    """Signs of life, in a thread of its own; ends the process when rank 0 is gone, or has given none for long."""
    signs, lead = board.signs(rank), board.signs(0)
    handle = os.pidfd_open(lead.pid)
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    while True:
        signs.beat()
        if ended.poll(0):
            os._exit(1)
        silent = (time.monotonic_ns() - lead.beat_ns) / 1e9 if lead.beat_ns else 0.0
        if silent > (patience_s if board.is_guarded else LEAD_SILENT_S):
            LOG.critical("rank 0 hangs: no sign of life for %.1f s; rank %d ends", silent, rank)
            if board.is_guarded:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os._exit(1)
        time.sleep(BEAT_S)


def follow(config: Config, where: RankAddress) -> int:
    """A rank's life; returns the exit code of its process."""
    signs: Signs | None = None
    try:
        meet = StoreMeeting.at(where, START_S)
        board = Board.open(meet(b"")[0].decode(), where.size)
        signs = board.signs(where.rank)
        signs.pid = os.getpid()
        watching = (board, where.rank, config.execution.rank_patience)
        threading.Thread(target=live, args=watching, name="beat", daemon=True).start()
        joined = join(config, open_checkpoint(config.model), meet, signs, prepare=prepared_by(config))
        Follower(where.rank, board, joined).run()
    except Closed:
        return 0
    except Exception as error:
        LOG.critical("rank %d failed", where.rank, exc_info=error)
        if signs is not None:
            signs.give_up(f"{type(error).__name__}: {error}")
        return 1


def check_size(config: Config, where: RankAddress) -> None:
    """Raises ConfigError where torchrun has started another number of ranks than the settings name."""
    if where.size != config.execution.tensor_parallel:
        asked = config.execution.tensor_parallel
        raise ConfigError(
            f"torchrun has started {where.size} ranks, and tensor_parallel is {asked}: use --tp {where.size}"
        )


def follow_launched(config: Config, where: RankAddress) -> NoReturn:
    """Makes a process that torchrun has started as another rank that rank, to its end. Raises as `check_size`."""
    check_size(config, where)
    _leave(follow(config, where))


def _leave(code: int) -> NoReturn:
    """Not by way of the interpreter's end: libraries of a device may wait there for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """`python -c ... RANK SIZE PORT PARENT`; the settings come on stdin."""
    rank, size, port, parent = (int(argument) for argument in sys.argv[1:5])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(levelname)s %(name)s: %(message)s")
    config = cast(Config, pickle.load(sys.stdin.buffer))
    _leave(follow(config, RankAddress(rank, size, HOST, port, serves_store=False)))
