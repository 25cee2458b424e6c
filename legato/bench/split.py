"""The iteration cut into several graphs, as engines have it whose host prepares each of them: what one graph is measured against.

Owns where it is cut and what the host does between. What is captured is the engine's own function, cut where it asks for tokens:
behind verification, and behind draft-extend. Called by `legato.bench.ablate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor

from legato.bench.steady import Steady
from legato.config import PAGE_SIZE
from legato.runtime.batch import Samplers
from legato.runtime.draw import Draw, Positions
from legato.runtime.graphs import Graphs, Key
from legato.runtime.mailbox import Ring
from legato.runtime.rows import Rows
from legato.runtime.staging import stage_into

PARTS = 3
Between = Literal["nothing", "host"]
"""Between graphs: the next is launched at once, or the host reads what was accepted and writes where rows stand."""


@contextlib.contextmanager
def split(steady: Steady, between: Between) -> Generator[SplitGraphs]:
    """While it lasts, the runner launches three graphs for an iteration: verification, draft-extend, the chain of drafts."""
    decoder = steady.runner.decoder
    assert decoder is not None, "a CPU runs no graphs"
    bucket = decoder.seats.seat(steady.plan.decodes)
    graphs = SplitGraphs(steady, decoder.key(bucket, "greedy"), between)
    whole, decoder.graphs = decoder.graphs, cast("Graphs", graphs)
    try:
        yield graphs
    finally:
        decoder.graphs = whole


@contextlib.contextmanager
def without_graphs(steady: Steady) -> Generator[None]:
    """While it lasts, every kernel of an iteration is launched by the host."""
    decoder = steady.runner.decoder
    assert decoder is not None, "a CPU runs no graphs"
    whole, decoder.graphs = decoder.graphs, Graphs()
    try:
        yield
    finally:
        decoder.graphs = whole


@dataclass(slots=True)
class _Cutting:
    """Chooses tokens as `draw` does, and cuts the capture behind verification and before the first draft is chosen."""

    draw: Draw
    graphs: SplitGraphs

    @property
    def wants_best(self) -> bool:
        return self.draw.wants_best

    def verify(self, logits: Tensor, rows: Rows, samplers: Samplers) -> Tensor:
        return self.draw.verify(logits, rows, samplers)

    def record(self, samplers: Samplers, sampled: Tensor, counts: Tensor) -> None:
        self.draw.record(samplers, sampled, counts)
        self.graphs.counts = counts
        self.graphs.cut()

    def draft(
        self, logits: Tensor, rows: Rows, samplers: Samplers, positions: Positions, drafted: Sequence[Tensor]
    ) -> Tensor:
        if not drafted:
            self.graphs.cut()
        return self.draw.draft(logits, rows, samplers, positions, drafted)


@dataclass(slots=True)
class _Metadata:
    """What a host writes for the rows of each graph: positions, lengths and cache slots. Copied to the device as such engines do,
    and not read there, since the graphs have them from the device's own table."""

    steady: Steady
    lengths: list[int]
    rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        runner = self.steady.runner
        width = runner.settings.num_drafts + 1
        size = 3 * len(self.lengths) * width
        self.rows = torch.zeros(size, dtype=torch.int64, device=runner.rows.tokens.device)

    def write(self) -> None:
        """For rows behind the lengths as the host knows them."""
        width = self.steady.runner.settings.num_drafts + 1
        positions = [length + row for length in self.lengths for row in range(width)]
        visible = [position + 1 for position in positions]
        slots = [PAGE_SIZE * (1 + position // PAGE_SIZE) + position % PAGE_SIZE for position in positions]
        stage_into(self.rows, [*positions, *visible, *slots])


class SplitGraphs:
    """The parts of one iteration, in place of `legato.runtime.graphs.Graphs`."""

    def __init__(self, steady: Steady, key: Key, between: Between) -> None:
        runner, decoder = steady.runner, steady.runner.decoder
        assert decoder is not None
        device = runner.rows.tokens.device
        self.counts: Tensor | None = None
        self._key, self._between, self._parts = key, between, list[torch.cuda.CUDAGraph]()
        self._pool = torch.cuda.graph_pool_handle()
        self._ring = Ring(key.bucket, key.num_drafts + 1, key.num_drafts, device)
        self._metadata = _Metadata(steady, runner.rows.lengths[list(steady.plan.decodes)].tolist())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            self._begin()
            self._ring.write(decoder.run(key.bucket, _Cutting(decoder.draw("greedy"), self)))
            self._parts[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        if len(self._parts) != PARTS:
            raise ValueError(f"the iteration was cut into {len(self._parts)} graphs, not {PARTS}: it needs drafts")

    def __contains__(self, key: Key) -> bool:
        return key == self._key

    @property
    def chain(self) -> torch.cuda.CUDAGraph:
        """The graph of the drafts behind the first. Replayed again and again it does the same again."""
        return self._parts[-1]

    def cut(self) -> None:
        """Ends the graph that is being captured and begins the next."""
        self._parts[-1].capture_end()
        self._begin()

    def launch(self, key: Key) -> Ring:
        """Launches the parts; returns their ring as `Graphs.launch` does."""
        del key
        for number, part in enumerate(self._parts):
            if self._between == "host":
                self._metadata.write()
            part.replay()
            if self._between == "host" and not number:
                assert self.counts is not None
                emitted: list[int] = self.counts.tolist()  # the host waits for the device
                self._metadata.lengths = [a + b for a, b in zip(self._metadata.lengths, emitted, strict=False)]
        return self._ring

    def _begin(self) -> None:
        self._parts.append(torch.cuda.CUDAGraph())
        self._parts[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")
