"""How fast this machine's memory gives bytes to a reader: the rate of a roofline where none is on record.

Owns one measurement on the CPU. On a GPU the rate is that of `legato.bench.record`. Called by `legato bench pareto`.
"""

from __future__ import annotations

import time

import torch

_BYTES = 256 << 20
_REPEATS = 7


def read_bytes_per_s(threads: int) -> float:
    """The best of several sums over a tensor larger than any cache, with that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(_BYTES // 4)
        best = float("inf")
        for _ in range(_REPEATS):
            start = time.perf_counter()
            data.sum()
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return _BYTES / best
