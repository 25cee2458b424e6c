"""What a GPU does during the steady state, kernel by kernel: how busy it is, what lies between iterations, what takes the time.

Owns the reading of a profile: which spans belong to one iteration (those of one graph launch, or of one turn), bubbles, and which
calls of the driver made the host wait. Measures nothing itself. Called by `legato bench trace` and by the GPU tests.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: Calls of the CUDA runtime and driver in which the host waits for the device.
WAITING_CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
)
#: Calls that allocate or free device memory.
ALLOCATING_CALLS = (
    "cudaMalloc",
    "cudaFree",
    "cuMemCreate",
    "cuMemMap",
    "cudaHostAlloc",
    "cudaFreeHost",
    "cudaMallocAsync",
)
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran on the device, or a call on the host. Times in nanoseconds; `launch`: what ties the two together."""

    name: str
    start: int
    stop: int
    launch: int
    is_copy: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Trace:
    """A profile of some iterations: kernels and copies of the device, and calls of the host, each in order of start."""

    device: tuple[Span, ...]
    host: tuple[Span, ...]

    @classmethod
    def of(cls, events: Iterable[Any]) -> Trace:
        """From the raw events of `torch.profiler` (`profile.profiler.kineto_results.events()`)."""
        device: list[Span] = []
        host: list[Span] = []
        for event in events:
            start, name = event.start_ns(), event.name()
            span = Span(name, start, start + event.duration_ns(), event.correlation_id(), name.startswith("Mem"))
            if event.device_type().name == "CUDA":
                device.append(span)
            elif name.startswith(("cuda", "cu")):
                host.append(span)
        return cls(tuple(sorted(device, key=_by_start)), tuple(sorted(host, key=_by_start)))

    def waits(self) -> Counter[str]:
        """How often the host waited for the device, by call."""
        return Counter(span.name for span in self.host if span.name in WAITING_CALLS)

    def allocations(self) -> Counter[str]:
        """How often memory was allocated or freed, by call."""
        return Counter(span.name for span in self.host if span.name in ALLOCATING_CALLS)

    def copies(self) -> Counter[str]:
        """Copies and fills on the device, by kind."""
        return Counter(span.name for span in self.device if span.is_copy)

    def iterations(self, graphs: int = 1) -> list[tuple[Span, ...]]:
        """What each iteration of so many graph launches ran, in order of launch."""
        launches = {span.launch for span in self.host if span.name.startswith(_GRAPH_LAUNCHES)}
        ran: defaultdict[int, list[Span]] = defaultdict(list)
        for span in self.device:
            if span.launch in launches:
                ran[span.launch].append(span)
        in_order = sorted(ran.values(), key=lambda spans: spans[0].start)
        return [
            tuple(itertools.chain.from_iterable(in_order[first : first + graphs]))
            for first in range(0, len(in_order) - graphs + 1, graphs)
        ]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a run of iterations, medians in microseconds.

    Attributes:
        iteration_us: from the start of one to the start of the next.
        busy_us: of those, something ran.
        gap_us: from the last kernel of one to the first of the next.
        kernels: number of an iteration's kernels.
        busy_percent: share of the whole time in which something ran.
        worst_gap_us: the largest gap.
    """

    num_iterations: int
    iteration_us: float
    busy_us: float
    gap_us: float
    worst_gap_us: float
    kernels: float
    busy_percent: float

    def fields(self) -> dict[str, float]:
        """As part of a line of a record."""
        return {
            "median_us": self.iteration_us,
            "busy_us": self.busy_us,
            "busy_percent": self.busy_percent,
            "gap_us": self.gap_us,
            "worst_gap_us": self.worst_gap_us,
            "kernels": self.kernels,
            "iterations": self.num_iterations,
        }


def figures(trace: Trace, graphs: int = 1) -> Figures:
    """Figures of a trace that holds at least two iterations of so many graph launches. Raises `ValueError` for another."""
    iterations = trace.iterations(graphs)
    if len(iterations) < 2:
        raise ValueError(
            f"the trace holds {len(iterations)} iterations of {graphs} graph launches; at least 2 are needed"
        )
    starts = [spans[0].start for spans in iterations]
    stops = [max(span.stop for span in spans) for spans in iterations]
    gaps = [(start - stop) / 1e3 for start, stop in zip(starts[1:], stops[:-1], strict=True)]
    within = [span for span in trace.device if starts[0] <= span.start < starts[-1]]
    return Figures(
        num_iterations=len(iterations),
        iteration_us=statistics.median((after - before) / 1e3 for before, after in itertools.pairwise(starts)),
        busy_us=statistics.median(busy(spans) / 1e3 for spans in iterations),
        gap_us=statistics.median(gaps),
        worst_gap_us=max(gaps),
        kernels=statistics.median(len(spans) for spans in iterations),
        busy_percent=100 * busy(within) / (starts[-1] - starts[0]),
    )


def busy(spans: Sequence[Span]) -> int:
    """Nanoseconds in which at least one of the spans (in order of start) ran: they overlap where a kernel starts early."""
    total, reached = 0, 0
    for span in spans:
        total += max(0, span.stop - max(span.start, reached))
        reached = max(reached, span.stop)
    return total


@dataclass(frozen=True, slots=True)
class Share:
    """All launches of one kernel: how many per iteration, and microseconds per iteration that nothing before them covers."""

    name: str
    launches: float
    us: float


def shares(iterations: Sequence[Sequence[Span]]) -> list[Share]:
    """Where the time of an iteration goes, the largest first. A kernel that starts before its predecessor has ended counts from
    that end on, so the shares add up to the busy time."""
    launches: Counter[str] = Counter()
    time: Counter[str] = Counter()
    for spans in iterations:
        reached = 0
        for span in spans:
            launches[span.name] += 1
            time[span.name] += max(0, span.stop - max(span.start, reached))
            reached = max(reached, span.stop)
    count = len(iterations)
    return [Share(name, launches[name] / count, total / 1e3 / count) for name, total in time.most_common()]


def _by_start(span: Span) -> int:
    return span.start
