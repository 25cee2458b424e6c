"""The steady state on a GPU: plans that only decode, padded to a bucket, eagerly or as captured graphs of the same functions.

Owns which graph serves what, and their capture at start-up. Where the host has a say in the choice of tokens, an iteration is two
graphs with the choice between them. Must not know plans; the runner seats rows, calls `launch` or `run`, or `begin` and
`complete`, and posts the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from legato.config import DEFAULT_DRAFTS, Resolved
from legato.runtime.batch import Batch, Layout, Samplers, decode_batch
from legato.runtime.draw import CHOICES, BestDraw, Draw, PlainDraw, Variant
from legato.runtime.graphs import Graphs, Key, Seats, buckets
from legato.runtime.mailbox import Ring, Written
from legato.runtime.rows import Rows
from legato.runtime.speculate import Iteration, Sampled, Verified

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begun:
    """An iteration up to the target's logits [B * R, W]; `tokens` [B, R] int64 is where the chosen ones are to be written."""

    batch: Batch
    hidden: Tensor
    logits: Tensor
    tokens: Tensor

    @property
    def samplers(self) -> Samplers:
        """The B requests."""
        assert self.batch.samplers is not None, "a decode batch samples"
        return self.batch.samplers


@dataclass(frozen=True, slots=True)
class Done:
    """An iteration, and where its letter is."""

    verified: Verified
    written: Written


class Decoder:
    """Decodes the rows that are seated, with any of the engine's numbers of drafts."""

    def __init__(self, iteration: Iteration, rows: Rows, settings: Resolved) -> None:
        self._iteration, self._rows, self._score_bytes = iteration, rows, settings.score_bytes
        self.buckets = buckets(settings.max_running)
        self.depths = settings.depths
        self.seats = Seats(self.buckets[-1], rows.tokens.device)
        self.graphs = Graphs()
        self._device = rows.tokens.device
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._rings: dict[Key, Ring] = {}

    @property
    def split_buckets(self) -> tuple[int, ...]:
        """Buckets of iterations in two parts: every second one, from the largest down. Empty places cost little."""
        return self.buckets[::-2]

    @property
    def split_depth(self) -> int:
        """K of iterations in two parts: the one for which there are graphs."""
        return max((depth for depth in self.depths if depth <= DEFAULT_DRAFTS), default=self.depths[0])

    def graph_keys(self) -> tuple[Key, ...]:
        """The graphs that serve every batch, the largest first: the smaller ones then fit into its memory."""
        whole = (
            Key(bucket, depth, variant)
            for bucket in reversed(self.buckets)
            for depth in reversed(self.depths)
            for variant in CHOICES
        )
        parts = (Key(bucket, self.split_depth, part) for bucket in self.split_buckets for part in ("target", "drafts"))
        return (*whole, *parts)  # type: ignore[arg-type]

    def key(self, bucket: int, variant: Variant, num_drafts: int | None = None) -> Key:
        """What the graph of a whole iteration is kept under; `None`: with the most drafts there are."""
        return Key(bucket, self.depths[-1] if num_drafts is None else num_drafts, variant)

    def draw(self, variant: Variant) -> Draw:
        """How whole iterations choose. Drafts that are verified by how likely they are need logits, the best alone does not."""
        is_best = variant == "greedy" and not self._iteration.threshold
        return BestDraw() if is_best else PlainDraw(CHOICES[variant])

    def launch(self, key: Key) -> Written:
        """One iteration of the first places, as one graph where there is one; returns where its letter is."""
        if key in self.graphs:
            ring: Ring = self.graphs.launch(key)
            return ring.take()
        self._whole(key)
        return self._ring(key).take()

    def run(self, bucket: int, draw: Draw, num_drafts: int | None = None) -> Verified:
        """The same kernel by kernel. This is what graphs are made of."""
        num_drafts = self.depths[-1] if num_drafts is None else num_drafts
        batch = self._batch(bucket, num_drafts)
        _, verified = self._iteration.run(batch, self._rows, draw, num_drafts)
        assert verified is not None, "a decode batch samples"
        return verified

    def begin(self, num_requests: int) -> tuple[Key, Begun]:
        """The first part of an iteration of the first places: up to the target's logits."""
        bucket = min(size for size in self.split_buckets if size >= num_requests)
        key = Key(bucket, self.split_depth, "target")
        begun: Begun = self.graphs.launch(key) if key in self.graphs else self._begin(key)
        return key, begun

    def complete(self, key: Key, begun: Begun) -> Done:
        """The second part: what follows from the tokens that were written."""
        behind = Key(key.bucket, key.num_drafts, "drafts")
        verified: Verified = self.graphs.launch(behind) if behind in self.graphs else self._complete(behind, begun)
        return Done(verified, self._ring(behind).take())

    def capture_all(self) -> Iterator[Key]:
        """Captures every graph; yields each key before its turn. What is compiled or loaded lazily is so in a run before it."""
        self.seats.seat((0,))
        begun: Begun | None = None
        for key in self.graph_keys():
            yield key
            if key.part == "target":
                begun = self._captured(key, partial(self._begin, key))
                self.graphs.launch(key)  # what follows is warmed up on what it leaves
            elif key.part == "drafts":
                assert begun is not None, "the parts of a bucket follow one another"
                self._captured(key, partial(self._complete, key, begun))
            else:
                self.capture(key)

    def capture(self, key: Key) -> None:
        """Captures the graph of a whole iteration, after a run on padding alone. Nothing is kept of it but where its letter goes:
        the next graph may use its memory."""
        self.seats.seat((0,))
        self._captured(key, partial(self._whole, key))

    def _whole(self, key: Key) -> Ring:
        assert key.variant is not None, "the parts of an iteration go together"
        self._seal(key, self.run(key.bucket, self.draw(key.variant), key.num_drafts))
        return self._ring(key)

    def _captured(self, key: Key, work: Callable[[], T]) -> T:
        made = self.graphs.capture(key, work)
        if key in self._rings:
            self._rings[key].take()  # the letter of the run before, which nobody reads
        return made

    def _begin(self, key: Key) -> Begun:
        batch = self._batch(key.bucket, key.num_drafts)
        iteration = self._iteration
        hidden = iteration.target.hidden(batch.ids, batch.step, iteration.caches)
        samplers = batch.samplers
        assert samplers is not None, "a decode batch samples"
        return Begun(batch, hidden, iteration.logits(hidden, samplers), torch.zeros_like(samplers.row_index))

    def _complete(self, key: Key, begun: Begun) -> Verified:
        sampled = Sampled(begun.hidden, begun.logits, begun.tokens)
        draw = PlainDraw(CHOICES["general"])  # drafts of greedy requests are greedy there too
        verified = self._iteration.settle(sampled, begun.batch, self._rows, draw, key.num_drafts)
        self._seal(key, verified)
        return verified

    def _batch(self, bucket: int, num_drafts: int) -> Batch:
        layout = self._layouts.get((bucket, num_drafts))
        if layout is None:
            layout = self._layouts[bucket, num_drafts] = Layout.of(bucket, num_drafts, self._device)
        batch = decode_batch(self.seats.places[:bucket], self._rows, self._iteration.target.spec, layout)
        return batch.within(self._score_bytes)

    def _seal(self, key: Key, verified: Verified) -> None:
        self._ring(key).write(verified)

    def _ring(self, key: Key) -> Ring:
        ring = self._rings.get(key)
        if ring is None:
            drafts = key.num_drafts if self._iteration.mtp is not None else 0
            ring = self._rings[key] = Ring(key.bucket, key.num_drafts + 1, drafts, self._device)
        return ring
