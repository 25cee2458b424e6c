"""What a GPU ran: kernels by name, how often and for how long, from PyTorch's profiler.

Owns the reading of one recording by kernel. Knows no benchmark. Called by `legato.bench.slice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from legato.bench.trace import Span, Trace


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel; copies and fills of memory count as kernels.

    Attributes:
        total_us: from its start to its end, summed; a kernel that starts early and waits for the one before counts in full.
        advance_us: by how much its ends came after every earlier end, gaps before it included. Over all kernels this sums up to
            the whole, so it says what an improvement can bring.
    """

    name: str
    calls: int
    total_us: float
    advance_us: float


def kernel_times(run: Callable[[], object]) -> tuple[KernelTime, ...]:
    """The kernels of one call of `run`, the one that took most of the time first.

    Times under the profiler are a little longer than without; their shares are what counts.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recording:
        run()
        torch.cuda.synchronize()
    recorded = recording.profiler
    assert recorded is not None and recorded.kineto_results is not None, "a recording that has ended has results"
    return by_kernel(Trace.of(recorded.kineto_results.events()).device)


def by_kernel(spans: Iterable[Span]) -> tuple[KernelTime, ...]:
    """The spans of one device by name."""
    calls: dict[str, list[Span]] = {}
    advances: dict[str, int] = {}
    end = None
    for span in sorted(spans, key=lambda span: span.stop):
        calls.setdefault(span.name, []).append(span)
        before = span.start if end is None else end
        advances[span.name] = advances.get(span.name, 0) + span.stop - before
        end = span.stop
    found = [
        KernelTime(name, len(of_one), sum(span.length for span in of_one) / 1e3, advances[name] / 1e3)
        for name, of_one in calls.items()
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.advance_us))
