"""The steady state as CUDA graphs: one per batch bucket, K and way of sampling, holding the whole iteration.

Owns the buckets, who sits where in one (`Seats`), capture and replay. What is captured is the very function that runs without
graphs. Must not know plans or requests. Called by the runner and by `runtime.warmup`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.runtime.draw import Variant
from legato.runtime.mailbox import Ring
from legato.runtime.speculate import Verified
from legato.runtime.staging import stage_into


def buckets(max_running: int) -> tuple[int, ...]:
    """Batch sizes that have a graph: powers of two up to the first that holds everyone."""
    sizes = [1]
    while sizes[-1] < max_running:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def bucket_of(num_requests: int) -> int:
    """The smallest bucket that holds so many requests (at least one)."""
    return 1 << (num_requests - 1).bit_length()


class Seats:
    """Which device row sits in which place of a batch; places that nobody takes hold row 0, which is padding.

    The places are one tensor that all graphs read, so a change of the composition is one small copy on the stream of the
    iterations, and no change is no copy.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.places = torch.zeros(size, dtype=torch.int64, device=device)
        self.num_changes = 0
        self._seated: tuple[int, ...] = ()

    def seat(self, device_rows: Sequence[int]) -> int:
        """Seats rows in this order for whatever is issued next; returns their bucket. Raises `ValueError` for too many."""
        size = self.places.shape[0]
        if not 0 < len(device_rows) <= size:
            raise ValueError(f"{len(device_rows)} rows to seat; there are {size} places, and none may be empty")
        wanted = tuple(device_rows)
        if wanted != self._seated:
            padded = [*wanted, *[0] * (size - len(wanted))]
            stage_into(self.places, padded)
            self._seated = wanted
            self.num_changes += 1
        return bucket_of(len(wanted))


@dataclass(frozen=True, slots=True)
class Key:
    """What a graph is captured for."""

    bucket: int
    num_drafts: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one graph: seconds to capture it, and bytes that its memory pool grew by."""

    seconds: float
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the ring of letters that it writes."""

    graph: torch.cuda.CUDAGraph
    ring: Ring


class Graphs:
    """The graphs of one device. They share one pool of memory, since they run one after the other."""

    def __init__(self) -> None:
        self.costs: dict[Key, Cost] = {}
        self._captured: dict[Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    @property
    def pool_bytes(self) -> int:
        """Device memory of the pool."""
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool))

    def capture(self, key: Key, iteration: Callable[[], Verified]) -> None:
        """Records one iteration. It has run before in this process, so that nothing is compiled or loaded now.

        Nothing is executed, so the device table stays as it is.
        """
        started, before = time.perf_counter(), self.pool_bytes
        ring = Ring(key.bucket, key.num_drafts + 1, torch.device("cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            ring.write(iteration())
        self._captured[key] = _Captured(graph, ring)
        self.costs[key] = Cost(time.perf_counter() - started, self.pool_bytes - before)

    def launch(self, key: Key) -> tuple[Tensor, int]:
        """Replays a graph; returns where its letter will be, and the letter's number (see `Ring.take`)."""
        captured = self._captured[key]
        captured.graph.replay()
        return captured.ring.take()
