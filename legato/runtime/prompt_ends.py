"""The ends of prompts on a GPU: padded to one of a few sizes, and run as a graph.

A pass kernel by kernel takes the host 45 to 90 ms on GLM-5.2, whatever its rows, and the device 11 to 54 for up to 512: without
graphs, what an agent adds to a long conversation would wait for the host. Owns the sizes, their graphs and letters. What is
captured is the function that runs without graphs. Must not know plans; the runner says which chunk, and posts the letter.
"""

from __future__ import annotations

from functools import partial

from legato.config import Resolved
from legato.plan import Extend
from legato.runtime.batch import Batch, PromptEnd
from legato.runtime.draw import CHOICES, PlainDraw
from legato.runtime.graphs import Graphs, Key
from legato.runtime.mailbox import Ring, Written
from legato.runtime.rows import Rows
from legato.runtime.speculate import Iteration

SIZES = (16, 64, 128, 256, 512)
"""Rows for which there are graphs: where kernels change their form, and up to where the device is faster than the host."""


class PromptEnds:
    """The ends of prompts of up to `sizes[-1]` rows, one at a time; each drafts `num_drafts` tokens behind its first."""

    def __init__(self, iteration: Iteration, rows: Rows, settings: Resolved, num_drafts: int, graphs: Graphs) -> None:
        self._iteration, self._rows, self._score_bytes = iteration, rows, settings.score_bytes
        self._num_drafts, self.graphs = num_drafts, graphs
        most = min(settings.chunk_tokens, settings.context)
        self.sizes = tuple(size for size in SIZES if size <= most)
        self._device = rows.tokens.device
        self._ends: dict[int, PromptEnd] = {}
        self._rings: dict[int, Ring] = {}

    def size_of(self, num_tokens: int) -> int | None:
        """The smallest size that holds so many tokens, if one does."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    def stage(self, size: int, extend: Extend) -> None:
        """Lays out the last chunk of a prompt for whatever is issued next."""
        self._end(size).stage(extend)

    def batch(self, size: int) -> Batch:
        """What was staged, as one batch."""
        return self._end(size).batch(self._rows, self._iteration.target.spec).within(self._score_bytes)

    def launch(self, size: int) -> Written:
        """Runs what was staged, as a graph where there is one; returns where its letter is."""
        key = self._key(size)
        if key in self.graphs:
            self.graphs.launch(key)
        else:
            self._run(size)
        return self._ring(size).take()

    def capture(self, size: int) -> None:
        """Captures the graph of a size, after a run on padding alone."""
        self._end(size).inputs.zero_()
        self.graphs.capture(self._key(size), partial(self._run, size))
        self._ring(size).take()  # the letter of that run, which nobody reads

    def _run(self, size: int) -> None:
        draw = PlainDraw(CHOICES["general"])  # greedy requests are greedy there too
        _, verified = self._iteration.run(self.batch(size), self._rows, draw, self._num_drafts)
        assert verified is not None, "the end of a prompt samples"
        self._ring(size).write(verified)

    def _key(self, size: int) -> Key:
        return Key(size, self._num_drafts, "prompt")

    def _end(self, size: int) -> PromptEnd:
        if size not in self._ends:
            self._ends[size] = PromptEnd.of(size, self._device)
        return self._ends[size]

    def _ring(self, size: int) -> Ring:
        if size not in self._rings:
            drafts = self._num_drafts if self._iteration.mtp is not None else 0
            self._rings[size] = Ring(1, 1, drafts, self._device)
        return self._rings[size]
