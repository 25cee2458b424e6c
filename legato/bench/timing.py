"""How long a call takes: replays of a CUDA graph of many calls, each on inputs of its own.

Owns warm-up, rotation and the statistics. Knows no op. Called by the benchmarks. Why graphs: the engine replays one, and
a Python loop hides kernels of a few microseconds behind the host. Why own inputs: repeated calls on one set of them
would measure the L2 cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch

#: Calls in one graph: at least, so that the graph's own start (3 us) counts little; at most, so that capture stays quick.
FEWEST_CALLS, MOST_CALLS = 20, 256
#: A set of calls is cold when its inputs exceed the L2 by this factor: none of it survives until the next replay.
COLD_FACTOR = 2.0
_SAMPLES = 25
_WARM_UP_SECONDS = 0.02


@dataclass(frozen=True)
class Spread:
    """Microseconds per call: the median over replays and the 20th and 80th percentile. `method`: "graph" (replays of a
    CUDA graph), "stream" (events around calls that cannot be captured) or "cpu" (wall clock)."""

    median_us: float
    p20_us: float
    p80_us: float
    method: Literal["graph", "stream", "cpu"]

    @property
    def fields(self) -> dict[str, float]:
        """The three figures as a line of a record names them."""
        return {"median_us": self.median_us, "p20_us": self.p20_us, "p80_us": self.p80_us}

    @staticmethod
    def of(samples: Sequence[float], method: Literal["graph", "stream", "cpu"]) -> Spread:
        ordered = sorted(samples)
        last = len(ordered) - 1
        at = [ordered[round(last * share)] for share in (0.5, 0.2, 0.8)]
        return Spread(at[0], at[1], at[2], method)


def calls_to_rotate(device: torch.device, bytes_per_call: int) -> int:
    """How many calls, each with inputs of its own, make a measurement that the L2 cache does not flatter."""
    if device.type != "cuda":
        return 1
    wanted = math.ceil(COLD_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size / max(bytes_per_call, 1))
    return max(FEWEST_CALLS, min(MOST_CALLS, wanted))


def is_cold(device: torch.device, bytes_per_call: int, num_calls: int) -> bool:
    """Whether the inputs of so many calls together exceed the L2 cache by `COLD_FACTOR`."""
    if device.type != "cuda":
        return False
    return num_calls * bytes_per_call >= COLD_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[Spread, list[object]]:
    """Time per call of running `calls` one after the other, and what each of them returned in the last run.

    On a GPU the calls are captured in one graph and the graph is replayed; calls that cannot be captured (they read a
    value on the host) are timed with events in the stream. The results are those of the timed run itself, so that
    checking them checks what was timed.
    """
    if device.type != "cuda":
        return _time_on_cpu(calls)
    for call in calls[: min(len(calls), 3)]:
        call()
    torch.cuda.synchronize(device)
    results: list[object] = []
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = [call() for call in calls]
    except RuntimeError:
        torch.cuda.synchronize(device)
        return _time_in_stream(calls, device)
    samples = [us / len(calls) for us in sample_graph(graph, device)]
    return Spread.of(samples, "graph"), results


def time_isolated(calls: Sequence[Callable[[], object]], device: torch.device) -> Spread:
    """Time per call where each call stands between ordinary kernels, so that nothing of it overlaps with the next.

    An empty-handed kernel (one element set to zero) follows every call; the time of a chain of those alone is
    subtracted. What remains is the call and one gap between dependent graph nodes, as in a chain without programmatic
    dependent launch.
    """
    spacer = torch.zeros(1, device=device)

    def spaced(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            call()
            return spacer.zero_()

        return run

    with_spacers, _ = time_calls([spaced(call) for call in calls], device)
    alone, _ = time_calls([spacer.zero_ for _ in calls], device)
    gap = alone.median_us
    return Spread(
        with_spacers.median_us - gap, with_spacers.p20_us - gap, with_spacers.p80_us - gap, with_spacers.method
    )


def count_launches(call: Callable[[], object]) -> int | None:
    """How many kernels a call launches on the current GPU, as a captured graph holds them (copies and fills that are no
    kernels are not counted); None where the call cannot be captured, or CUDA's bindings are not installed."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return None
    runtime = import_module("cuda.bindings.runtime")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, _, num_nodes = runtime.cudaGraphGetNodes(handle)
    _, nodes, _ = runtime.cudaGraphGetNodes(handle, num_nodes)
    kinds = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes[:num_nodes]]
    return kinds.count(runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel)


def sample_graph(graph: torch.cuda.CUDAGraph, device: torch.device, num_samples: int = _SAMPLES) -> list[float]:
    """Microseconds of single replays, after replays for at least 20 ms (clocks rise, weights settle)."""
    began = time.perf_counter()
    while time.perf_counter() - began < _WARM_UP_SECONDS:
        graph.replay()
        torch.cuda.synchronize(device)
    return _samples(graph, device, num_samples)


def sample_replays(graph: torch.cuda.CUDAGraph, num_samples: int, warm_up: int = 20) -> list[float]:
    """Microseconds of single replays, for graphs that several ranks must replay equally often."""
    for _ in range(warm_up):
        graph.replay()
    torch.cuda.synchronize()
    return _samples(graph, torch.device("cuda"), num_samples)


def _samples(graph: torch.cuda.CUDAGraph, device: torch.device, num_samples: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * num_samples)]
    # Queued behind one another, with a replay in front, so that no sample waits for the host.
    graph.replay()
    for sample in range(num_samples):
        marks[2 * sample].record()
        graph.replay()
        marks[2 * sample + 1].record()
    torch.cuda.synchronize(device)
    return [1e3 * marks[2 * i].elapsed_time(marks[2 * i + 1]) for i in range(num_samples)]


def _time_in_stream(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[Spread, list[object]]:
    samples: list[float] = []
    results: list[object] = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        results = [call() for call in calls]
        end.record()
        torch.cuda.synchronize(device)
        samples.append(1e3 * begin.elapsed_time(end) / len(calls))
    return Spread.of(samples, "stream"), results


def _time_on_cpu(calls: Sequence[Callable[[], object]]) -> tuple[Spread, list[object]]:
    results = [call() for call in calls]
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - began < 0.2 and len(samples) < _SAMPLES):
        start = time.perf_counter()
        results = [call() for call in calls]
        samples.append(1e6 * (time.perf_counter() - start) / len(calls))
    return Spread.of(samples, "cpu"), results
