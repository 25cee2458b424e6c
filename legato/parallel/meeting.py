# pyright: reportPrivateImportUsage=false
"""Where the processes of a group meet before they can use their devices: every rank's bytes, given to every rank.

Owns the keys in the store. Must not know what the bytes mean, nor how processes were started. Called by whoever starts ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch import distributed

from legato.config import RankAddress
from legato.parallel.mesh import Mesh

_LOOK_S = 0.01


class MeetingError(RuntimeError):
    """A rank has not come to a meeting in time."""


def _patiently() -> None:
    """Between two looks: nothing that could end the waiting."""


class StoreMeeting:
    """Meets through a `torch.distributed` store: a server in rank 0's process, known to all by host and port."""

    def __init__(
        self, mesh: Mesh, store: distributed.Store, timeout_seconds: float, look: Callable[[], None] = _patiently
    ) -> None:
        """`look` is called again and again while a rank waits, and may raise."""
        self.mesh = mesh
        self._store, self._timeout, self._look = store, timeout_seconds, look
        self._count = 0

    @staticmethod
    def at(where: RankAddress, timeout_seconds: float, look: Callable[[], None] = _patiently) -> StoreMeeting:
        """The meeting at a store of this address. Raises `torch.distributed.DistError` where it cannot be opened, or reached
        within the time."""
        timeout = timedelta(seconds=timeout_seconds)
        store = distributed.TCPStore(
            where.host, where.port, where.size, where.serves_store, timeout, wait_for_workers=False
        )
        kept_apart = distributed.PrefixStore("legato", store)  # the launcher keeps things of its own there
        return StoreMeeting(Mesh(where.rank, where.size), kept_apart, timeout_seconds, look)

    @property
    def store(self) -> distributed.Store:
        """For a process group of the same ranks; its keys do not meet these."""
        return distributed.PrefixStore("group", self._store)

    def __call__(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in the order of ranks; returns when all ranks have called as often as this one. Raises
        MeetingError where one does not come in time."""
        self._count += 1
        self._store.set(f"meeting {self._count} of {self.mesh.rank}", data.hex())
        return [self._from(rank) for rank in range(self.mesh.size)]

    def _from(self, rank: int) -> bytes:
        key, began = f"meeting {self._count} of {rank}", time.monotonic()
        while not self._store.check([key]):
            if time.monotonic() - began > self._timeout:
                raise MeetingError(f"rank {rank} has not come to meeting {self._count} within {self._timeout:g} s")
            self._look()
            time.sleep(_LOOK_S)
        return bytes.fromhex(self._store.get(key).decode())
