"""Recordings of a rank's share in its steady state: how busy the device is, which ops take time that bytes do not explain.

Owns what is recorded and the files. Knows no terminal. Called by `legato bench slice --trace` and `legato bench ablate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from legato.bench import perfetto
from legato.bench.attribution import Piece, noted, op_times, pieces
from legato.bench.record import MEASURED_BANDWIDTH
from legato.bench.share import Share
from legato.bench.steady import Steady, turns
from legato.bench.trace import Span, Trace, figures, shares
from legato.bench.trace_page import View, page

SHOWN_ITERATIONS = 3
"""Iterations that the file for Perfetto holds."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A view for the page, the spans of a few iterations for Perfetto, and the driver's calls in which the host waited or took
    memory, the profiler's own at its end left out."""

    view: View
    few: tuple[Span, ...]
    waits: Counter[str]
    allocations: Counter[str]

    def fields(self) -> dict[str, Any]:
        """As part of a line of a record."""
        return {
            **self.view.figures.fields(),
            "waits": dict(self.waits),
            "allocations": dict(self.allocations),
            "ops": [
                {
                    "op": op.op,
                    "launches": op.launches,
                    "us": op.us,
                    "floor_us": op.floor_us,
                    "above_us": op.above_us,
                    "kernels": list(op.kernels),
                }
                for op in self.view.ops
            ],
        }


def record(name: str, steady: Steady, iterations: int, attributed: Sequence[Piece], graphs: int = 1) -> Recorded:
    """Records iterations of so many graph launches each with one in flight (none where an iteration is more than one graph: the
    host then waits within it)."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        emitted = sum(tokens or 0 for tokens in turns(steady, iterations, 1 if graphs == 1 else 0))
    assert emitted and profiled.profiler is not None and profiled.profiler.kineto_results is not None
    trace = Trace.of(profiled.profiler.kineto_results.events())
    listed = trace.iterations(graphs)
    middle = len(listed) // 2
    bandwidth = MEASURED_BANDWIDTH.get(torch.cuda.get_device_name(steady.runner.rows.tokens.device))
    ops = op_times(listed[middle], attributed, bandwidth / 1e6 if bandwidth else None)
    waits = trace.waits()
    waits["cudaDeviceSynchronize"] -= 1  # the profiler's, when it ends
    return Recorded(
        View(name, figures(trace, graphs), listed[middle], shares(listed), ops),
        tuple(span for spans in listed[middle : middle + SHOWN_ITERATIONS] for span in spans),
        +waits,
        trace.allocations(),
    )


@torch.inference_mode()
def attribute(steady: Steady, share: Share) -> list[Piece]:
    """The kernels of one iteration with their ops, from a recording of the function that the graph was captured from.

    Raises:
        ValueError: the recording does not hold every mark.
    """
    decoder = steady.runner.decoder
    assert decoder is not None, "only a GPU is recorded"
    bucket = decoder.seats.seat(steady.plan.decodes)
    mtp = steady.runner.iteration.mtp
    mark = torch.ones(1, device=steady.runner.rows.tokens.device)
    mark.sinc_()
    torch.cuda.synchronize()
    with (
        noted([share.weights, None if mtp is None else mtp.head], mark.sinc_) as found,
        profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled,
    ):
        decoder.run(bucket, decoder.draw("greedy"))
        torch.cuda.synchronize()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    return pieces(Trace.of(profiled.profiler.kineto_results.events()).device, found.calls())


def write(folder: Path, title: str, conditions: str, recorded: Sequence[Recorded]) -> None:
    """`trace.html` and `trace.json.gz` (for ui.perfetto.dev), of one recording or of several beside one another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.html").write_text(page(title, conditions, [one.view for one in recorded]), encoding="utf-8")
    groups = {one.view.name or "device": one.few for one in recorded}
    perfetto.write(folder / "trace.json.gz", groups, f"{title}; {conditions}")
