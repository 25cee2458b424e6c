"""The steady state as CUDA graphs: one per batch bucket, K and way of sampling, holding the whole iteration; or its two parts,
where tokens are chosen between them.

Owns the buckets, who sits where in one (`Seats`), capture and replay. What is captured is the very function that runs without
graphs. Must not know plans or requests. Called by `runtime.decode` and by `runtime.warmup`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from legato.runtime.draw import Variant
from legato.runtime.staging import stage_into

T = TypeVar("T")
Part = Variant | Literal["target", "drafts", "prompt"]
"""What a graph holds: a whole iteration with its way of sampling, what stands before the choice of tokens, or behind it; or
some layers of the end of a prompt."""


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
    """What a graph is captured for. `bucket`: requests that decode, or rows of a prompt's end, which goes through `layers`."""

    bucket: int
    num_drafts: int
    part: Part
    layers: range | None = None

    @property
    def variant(self) -> Variant | None:
        """How a whole iteration chooses; `None` for a part of one."""
        part = self.part
        return part if part == "greedy" or part == "general" else None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one graph: seconds to capture it, and bytes that its memory pool grew by."""

    seconds: float
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class _Captured(Generic[T]):
    """A graph, and what it leaves: tensors that every replay writes anew."""

    graph: torch.cuda.CUDAGraph
    made: T


class Graphs:
    """The graphs of one device. They share one pool of memory, since they run one after the other."""

    def __init__(self) -> None:
        self.costs: dict[Key, Cost] = {}
        self._captured: dict[Key, _Captured[Any]] = {}
        self._pool: Any = None

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    @property
    def pool_bytes(self) -> int:
        """Device memory of the pool."""
        return sum(cost.pool_bytes for cost in self.costs.values())

    def capture(self, key: Key, work: Callable[[], T]) -> T:
        """Runs `work` once, so that nothing is compiled or loaded afterwards, and records it: then nothing is executed, so the
        device table stays as that run left it. Returns what the graph leaves."""
        work()
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        started = time.perf_counter()
        torch.cuda.empty_cache()  # as capturing does: what is reserved from here on is the pool's
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = work()
        self._captured[key] = _Captured(graph, made)
        self.costs[key] = Cost(time.perf_counter() - started, torch.cuda.memory_reserved() - before)
        return made

    def launch(self, key: Key) -> Any:
        """Replays a graph; returns what it leaves."""
        captured = self._captured[key]
        captured.graph.replay()
        return captured.made
