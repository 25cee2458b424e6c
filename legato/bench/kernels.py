"""What a GPU ran: kernels by name, how often and for how long, from PyTorch's profiler.

Owns the reading of one recording. Knows no benchmark. Called by `legato.bench.slice`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel; copies and fills of memory count as kernels."""

    name: str
    calls: int
    total_us: float


def kernel_times(run: Callable[[], object]) -> tuple[KernelTime, ...]:
    """The kernels of one call of `run`, the one that took longest in all first.

    Times under the profiler are a little longer than without; their shares are what counts.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        run()
        torch.cuda.synchronize()
    calls: dict[str, list[float]] = {}
    for event in recording.events() or ():
        if event.device_type == DeviceType.CUDA:
            calls.setdefault(event.name, []).append(event.time_range.elapsed_us())
    found = [KernelTime(name, len(times), sum(times)) for name, times in calls.items()]
    return tuple(sorted(found, key=lambda kernel: -kernel.total_us))
