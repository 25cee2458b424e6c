"""How a rank comes by its part: its device, its communicator, its share of the weights, and a warm runner.

The same for rank 0 and all others, step by step, because they meet on the way. Called by `lead` and `follow`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor, distributed

from legato.config import Config, ConfigError
from legato.engine.ranks.board import DIGEST_BYTES, Signs, chained
from legato.engine.start import Loaded, build_runner, load_rank
from legato.model.checkpoint import Checkpoint, Progress, no_progress
from legato.model.inventory import stored_spec
from legato.parallel import Communicator, DistributedRank, Mesh
from legato.parallel.meeting import StoreMeeting
from legato.plan import Outcome
from legato.runtime.runner import Runner

HOST = "127.0.0.1"
START_S = 600.0
"""How long ranks wait for one another while they load and warm up, where one may compile what another has found on disk."""
HIDDEN_ROWS = 128
"""Rows of one sum through shared memory; up to four times as many go in several, more through NCCL."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A communicator that notes, on this rank's page, each collective that it enters: so a rank that hangs in none, while
    others wait for it in one, can be named. For devices whose collectives the host calls one by one."""

    inner: Communicator
    signs: Signs

    @property
    def mesh(self) -> Mesh:
        return self.inner.mesh

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.signs.collectives += 1
        return self.inner.add_norm(partial, residual, weight, eps)

    def all_reduce(self, partial: Tensor) -> Tensor:
        self.signs.collectives += 1
        return self.inner.all_reduce(partial)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        self.signs.collectives += 1
        return self.inner.all_gather(shard, dim)


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank that is ready."""

    loaded: Loaded
    runner: Runner
    communicator: Communicator

    def check(self) -> None:
        """Raises RankLostError where the device has waited for a rank in vain. On a CPU, collectives raise by themselves."""
        check = getattr(self.communicator, "check", None)
        if check is not None:
            check()

    def wait_at_most(self, seconds: float) -> None:
        """From now on: how long the device waits for a rank."""
        wait = getattr(self.communicator, "wait_at_most", None)
        if wait is not None:
            wait(seconds)


NOTHING_BROUGHT = bytes(DIGEST_BYTES)


def digest_of(before: bytes, outcome: Outcome) -> bytes:
    """Of all tokens up to a step, on any rank: `before` is that of the step before. A rank that once differs differs for good, so
    that not every step needs to be looked at."""
    brought = [(emission.row, emission.tokens, emission.done) for emission in outcome.emissions]
    return chained(before, repr((outcome.epoch, brought)).encode())


def placed(config: Config, rank: int) -> Config:
    """The settings of one rank: on a machine with GPUs, those of its own GPU.

    Raises ConfigError where there are too few of them.
    """
    execution = config.execution
    if execution.device == "cpu" or (execution.device == "auto" and not torch.cuda.is_available()):
        return replace(config, execution=replace(execution, device="cpu"))
    found = torch.cuda.device_count()
    if found < execution.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel {execution.tensor_parallel} takes as many GPUs, and PyTorch finds {found} here"
        )
    return replace(config, execution=replace(execution, device=f"cuda:{rank}", tensor_parallel=1))


Prepare = Callable[[Runner], None]
"""What a rank does with its warm runner before the others may count on it."""


def join(
    config: Config,
    checkpoint: Checkpoint,
    meet: StoreMeeting,
    signs: Signs,
    progress: Progress = no_progress,
    prepare: Prepare = lambda runner: None,
) -> Joined:
    """Everything from the first meeting to a warm runner. All ranks run it at the same time, with the same settings.

    Raises: as `engine.start.load_rank`; ConfigError for too few GPUs; MeetingError where a rank does not come.
    """
    mesh = meet.mesh
    own = placed(config, mesh.rank)
    is_cpu = own.execution.device == "cpu"
    if not is_cpu:
        torch.cuda.set_device(mesh.rank)
    meet(b"")  # all are there, before anything waits for them that cannot be interrupted
    distributed.init_process_group(
        "gloo" if is_cpu else "nccl",
        store=meet.store,
        rank=mesh.rank,
        world_size=mesh.size,
        timeout=timedelta(seconds=START_S),
        device_id=None if is_cpu else torch.device(own.execution.device),
    )
    library = DistributedRank(mesh)
    loaded = load_rank(own, checkpoint, progress, mesh)
    communicator: Communicator = Counted(library, signs) if is_cpu else _inboxes(config, checkpoint, meet, library)
    runner = build_runner(loaded.spec, loaded.weights, loaded.settings, communicator, progress)
    joined = Joined(loaded, runner, communicator)
    prepare(runner)
    meet(b"")
    joined.wait_at_most(config.execution.rank_patience)
    return joined


def _inboxes(config: Config, checkpoint: Checkpoint, meet: StoreMeeting, library: DistributedRank) -> Communicator:
    """Sums through shared memory of the GPUs. Imported here: a CPU has none of what it needs."""
    ipc = importlib.import_module("legato.parallel.ipc")
    inbox = importlib.import_module("legato.ops.reduce.inbox")
    size, width = meet.mesh.size, stored_spec(checkpoint).hidden_size
    two_shot_rows = config.execution.two_shot_rows or inbox.two_shots_pay_from(size, width)
    shape = inbox.InboxShape(size, width, HIDDEN_ROWS, two_shot_rows)
    importlib.import_module("legato.ops.reduce.sm90").load_sums(shape)
    return ipc.connect(meet.mesh, meet, shape, START_S, library)
