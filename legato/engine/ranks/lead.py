"""Rank 0 of an engine of several ranks: starts the others, tells them every plan, and ends with them.

Owns the processes of the other ranks and the start of an engine, whatever the number of its ranks. Called by `legato.llm` and
`legato.assembly`.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import distributed

from legato.config import Config, RankAddress, rank_from_environment
from legato.engine.ranks.board import Board
from legato.engine.ranks.follow import check_size, follow_launched
from legato.engine.ranks.join import HOST, NOTHING_BROUGHT, START_S, Joined, digest_of, join
from legato.engine.ranks.watch import Watch
from legato.engine.start import Started, engine_around
from legato.engine.start import start as start_alone
from legato.model.checkpoint import Checkpoint, Progress, no_progress
from legato.parallel.meeting import StoreMeeting
from legato.plan import Outcome, Plan
from legato.types import SamplingParams

if TYPE_CHECKING:
    from legato.runtime.grammar import Grammars
    from legato.runtime.runner import Flight

LOG = logging.getLogger(__name__)

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from legato.engine.ranks.follow import main; main()"
)
"""With the module path of this process."""
STDERR = 2
PAUSE_S = 0.0002
"""Between two looks at ranks that have not read what their slots hold."""
REMEMBERED = 64
"""Steps whose outcome is kept for the ranks that settle them later."""


def start(config: Config, checkpoint: Checkpoint, progress: Progress = no_progress) -> Started:
    """Builds an engine for an opened checkpoint, of as many ranks as the settings say.

    Raises: as `engine.start.load_rank`; RankLost where another rank cannot start, with its reason; BoardError where ranks
    cannot share memory. In a process that torchrun has started as another rank it does not return: the process is that rank.
    """
    launched = rank_from_environment()
    if launched is not None and launched.rank:
        follow_launched(config, launched)
    if launched is not None:
        check_size(config, launched)
    if config.execution.tensor_parallel == 1:
        return start_alone(config, checkpoint, progress)
    ranks = Ranks.start(config) if launched is None else Ranks.launched(launched)
    try:
        joined = ranks.join(config, checkpoint, progress)
    except Exception as error:
        explained = ranks.watch.explain(error)
        ranks.close()
        if explained is error:
            raise
        raise explained from error
    ranks.watch.patience_s = config.execution.rank_patience
    loaded = joined.loaded
    engine = engine_around(LeadRunner(joined, ranks), loaded.settings, loaded.spec)
    return Started(engine, loaded.spec, loaded.settings, checkpoint, ranks.watch)


class Ranks:
    """The other ranks of this engine: their processes, the memory shared with them, and the watch over them."""

    def __init__(self, board: Board, store: RankAddress, children: dict[int, subprocess.Popen[bytes]]) -> None:
        self.board, self._store, self._children = board, store, children
        self.watch = Watch(board, children)
        # Frees this thread from a collective of NCCL, whose other ranks are gone; gloo's end with their connections.
        self.watch.on_stuck = lambda lost: leave_group(is_lost=True)
        self._outcomes: OrderedDict[int, bytes] = OrderedDict()
        self._brought = NOTHING_BROUGHT

    @staticmethod
    def start(config: Config) -> Ranks:
        """Starts the processes. They end when this thread ends, however that happens."""
        size = config.execution.tensor_parallel
        board, port = Board.create(size), _free_port()
        # Plain values: settings hold read-only views, which cannot be sent.
        told = pickle.dumps(replace(config, execution=replace(config.execution, ops=dict(config.execution.ops))))
        children: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            arguments = [json.dumps(sys.path), str(rank), str(size), str(port), str(os.getpid())]
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, *arguments],
                stdin=subprocess.PIPE,
                stdout=STDERR,
                start_new_session=True,  # Ctrl-C in the terminal is for rank 0
            )
            children[rank] = child
            assert child.stdin is not None
            with child.stdin:
                child.stdin.write(told)
        return Ranks(board, RankAddress(0, size, HOST, port, serves_store=True), children)

    @staticmethod
    def launched(launched: RankAddress) -> Ranks:
        """Ranks that torchrun has started."""
        return Ranks(Board.create(launched.size), launched, {})

    def join(self, config: Config, checkpoint: Checkpoint, progress: Progress) -> Joined:
        """Rank 0's own part."""
        meet = StoreMeeting.at(self._store, START_S, self.watch.raise_if_lost)
        meet(self.board.path.encode())
        return join(config, checkpoint, meet, self.board.signs(0), progress)

    def publish(self, plan: Plan) -> None:
        """Tells the other ranks. Raises RankLost."""
        self.watch.raise_if_lost()
        self.board.publish(pickle.dumps(plan), self._pause)

    def compare(self, number: int, outcome: Outcome) -> None:
        """Notes what step `number` brought here, and compares with what other ranks have settled since. Raises RankLost."""
        self._outcomes[number] = self._brought = digest_of(self._brought, outcome)
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)
        for rank in range(1, self.board.num_ranks):
            settled, digest = self.board.signs(rank).outcome
            if self._outcomes.get(settled, digest) != digest:
                self.watch.lose(f"rank {rank} computed other tokens than rank 0, in step {settled} or before")
                self.watch.raise_if_lost()

    def close(self) -> None:
        """Ends the other ranks."""
        self.watch.close()
        for child in self._children.values():
            child.wait()
        leave_group(self.watch.is_lost)

    def _pause(self) -> None:
        self.watch.raise_if_lost()
        time.sleep(PAUSE_S)


class LeadRunner:
    """Rank 0's runner, whose plans all ranks carry out. The ranks end with it."""

    def __init__(self, joined: Joined, ranks: Ranks) -> None:
        self._joined, self._ranks = joined, ranks
        self.grammars: Grammars | None = None
        self._number = 0
        weakref.finalize(self, ranks.close)

    def check(self, params: SamplingParams) -> None:
        """As `Runner.check`."""
        self._joined.runner.grammars = self.grammars
        self._joined.runner.check(params)

    def launch(self, plan: Plan) -> LeadFlight:
        """Launches the plan on all ranks. Raises RankLost where that cannot be."""
        self._ranks.publish(plan)
        self._number += 1
        try:
            flight = self._joined.runner.launch(plan)
        except Exception as error:
            raise self._ranks.watch.explain(error) from error
        return LeadFlight(flight, self._number, self._joined, self._ranks)


class LeadFlight:
    """A plan in the air on all ranks."""

    def __init__(self, flight: Flight, number: int, joined: Joined, ranks: Ranks) -> None:
        self.plan = flight.plan
        self._flight, self._number, self._joined, self._ranks = flight, number, joined, ranks

    def outcome(self) -> Outcome:
        """As `Flight.outcome`. Raises RankLost where a rank has not taken part, or has brought something else."""
        try:
            outcome = self._flight.outcome()
            self._joined.check()
        except Exception as error:
            raise self._ranks.watch.explain(error) from error
        self._ranks.compare(self._number, outcome)
        return outcome


def leave_group(is_lost: bool) -> None:
    """Ends this process's part in the group. Of ranks that are lost, NCCL would wait for a farewell."""
    if not distributed.is_initialized():
        return
    if is_lost and distributed.get_backend() == "nccl":
        distributed.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
    else:
        distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
