"""The ends of prompts on a GPU: padded to one of a few sizes, and run as graphs of a few layers each.

A pass kernel by kernel takes the host 45 to 90 ms on GLM-5.2, whatever its rows, and the device 11 to 54 for up to 512: without
graphs, what an agent adds to a long conversation would wait for the host. In parts, so that those who decode run between them.
Owns the sizes, the parts, their graphs, what stands between them, and letters. What is captured is the function that runs without
graphs. Must not know plans; the runner says which chunk and how far, and posts the letter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from legato.config import Resolved
from legato.model.glm import Midway
from legato.model.step import Selection
from legato.plan import Extend
from legato.runtime.batch import Batch, PromptEnd
from legato.runtime.draw import CHOICES, PlainDraw
from legato.runtime.graphs import Graphs, Key
from legato.runtime.mailbox import Ring, Written
from legato.runtime.rows import Rows
from legato.runtime.speculate import Iteration

SIZES = (16, 64, 128, 256, 512)
"""Rows for which there are graphs: where kernels change their form, and up to where the device is faster than the host."""
LAYERS = 8
"""Layers of one graph: of 512 rows they take GLM-5.2 as long as an iteration of one request."""


def sizes_of(settings: Resolved) -> tuple[int, ...]:
    """The sizes that an engine has: those that a chunk and the context leave. None on a CPU."""
    most = min(settings.chunk_tokens, settings.context)
    return () if settings.device == "cpu" else tuple(size for size in SIZES if size <= most)


@dataclass(frozen=True, slots=True)
class _Between:
    """What stands between two parts: T rows behind some layers, in memory that no graph uses for anything else."""

    h: Tensor
    normed: Tensor
    slots: Tensor
    counts: Tensor

    @classmethod
    def like(cls, rows: Midway) -> _Between:
        selection = _selection(rows)
        return cls(*(tensor.clone() for tensor in (rows.h, rows.normed, selection.slots, selection.counts)))

    def take(self, rows: Midway) -> None:
        """Copies what the next part begins with."""
        selection = _selection(rows)
        for own, tensor in (
            (self.h, rows.h),
            (self.normed, rows.normed),
            (self.slots, selection.slots),
            (self.counts, selection.counts),
        ):
            own.copy_(tensor)

    def behind(self, depth: int) -> Midway:
        """As rows that have been through so many layers."""
        return Midway(self.h, self.normed, Selection(self.slots, self.counts), depth)


class PromptEnds:
    """The ends of prompts of up to `sizes[-1]` rows, one at a time; each drafts `num_drafts` tokens behind its first.

    One is staged, goes through the layers part by part, and is finished; or what is behind its layers is asked for.
    """

    def __init__(
        self,
        iteration: Iteration,
        rows: Rows,
        sizes: tuple[int, ...],
        score_bytes: int,
        num_drafts: int,
        graphs: Graphs,
    ) -> None:
        self._iteration, self._rows, self._score_bytes = iteration, rows, score_bytes
        self._num_drafts, self.sizes, self.graphs = num_drafts, sizes, graphs
        self._num_layers = iteration.target.spec.num_layers
        self._device = rows.tokens.device
        self._ends: dict[int, PromptEnd] = {}
        self._batches: dict[int, Batch] = {}
        self._between: dict[int, _Between] = {}
        self._rings: dict[int, Ring] = {}

    def size_of(self, num_tokens: int) -> int | None:
        """The smallest size that holds so many tokens, if one does."""
        return next((size for size in self.sizes if size >= num_tokens), None)

    def stage(self, size: int, extend: Extend) -> None:
        """Lays out the last chunk of a prompt for whatever is issued next."""
        self._end(size).stage(extend)

    def through(self, size: int, layers: range) -> None:
        """Takes what was staged through these layers, as graphs where there are some. They begin where the last ones stopped,
        and both ends are those of parts. Raises ValueError where they are not."""
        parts = [part for part in self._parts() if layers.start <= part.start < layers.stop]
        if layers and (not parts or (parts[0].start, parts[-1].stop) != (layers.start, layers.stop)):
            raise ValueError(f"{layers} are not whole parts of {LAYERS} layers")
        for part in parts:
            self._run(size, part)

    def finish(self, size: int) -> Written:
        """Behind all layers: chooses the first token, drafts; returns where the letter is. As a graph where there is one."""
        self._run(size, self._behind)
        return self._ring(size).take()

    def batch(self, size: int) -> Batch:
        """What has gone through the layers, as one batch."""
        return self._batches[size]

    def hidden(self, size: int) -> Tensor:
        """[T, D] post-norm hidden states behind all layers, until the next end of this size goes through them."""
        return self._between[size].normed

    def capture(self, size: int) -> None:
        """Captures the graphs of a size, each after a run on padding alone."""
        self._end(size).inputs.zero_()
        for part in self._parts():
            key = self._key(size, part)
            self.graphs.capture(key, partial(self._work, size, part))
            self.graphs.launch(key)  # the next part reads what this one leaves in its own memory
        self.graphs.capture(self._key(size, self._behind), partial(self._work, size, self._behind))
        self._ring(size).take()  # the letter of the run before, which nobody reads

    @property
    def _behind(self) -> range:
        return range(self._num_layers, self._num_layers + 1)

    def _parts(self) -> Iterator[range]:
        for start in range(0, self._num_layers, LAYERS):
            yield range(start, min(start + LAYERS, self._num_layers))

    def _run(self, size: int, part: range) -> None:
        key = self._key(size, part)
        if key in self.graphs:
            self.graphs.launch(key)
        else:
            self._work(size, part)

    def _work(self, size: int, part: range) -> None:
        target, caches = self._iteration.target, self._iteration.caches
        if part == self._behind:
            draw = PlainDraw(CHOICES["general"])  # greedy requests are greedy there too
            verified = self._iteration.finish(self.hidden(size), self.batch(size), self._rows, draw, self._num_drafts)
            assert verified is not None, "the end of a prompt samples"
            self._ring(size).write(verified)
            return
        if part.start:
            rows = self._between[size].behind(part.start)
        else:
            batch = self._end(size).batch(self._rows, target.spec).within(self._score_bytes)
            self._batches[size], rows = batch, target.enter(batch.ids)
        rows = target.through(rows, self.batch(size).step, caches, part.stop)
        if size not in self._between:
            self._between[size] = _Between.like(rows)
        self._between[size].take(rows)

    def _key(self, size: int, part: range) -> Key:
        return Key(size, self._num_drafts, "prompt", part)

    def _end(self, size: int) -> PromptEnd:
        if size not in self._ends:
            self._ends[size] = PromptEnd.of(size, self._device)
        return self._ends[size]

    def _ring(self, size: int) -> Ring:
        if size not in self._rings:
            drafts = self._num_drafts if self._iteration.mtp is not None else 0
            self._rings[size] = Ring(1, 1, drafts, self._device)
        return self._rings[size]


def _selection(rows: Midway) -> Selection:
    assert rows.selection is not None, "the first layer selects"
    return rows.selection
