"""The steady state on a GPU: plans that only decode, padded to a bucket, eagerly or as a captured graph of the same function.

Owns which graph serves what, and their capture at start-up. Must not know plans; the runner seats rows, calls `launch` or `run`
and posts what they return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.config import Resolved
from legato.runtime.batch import Layout, decode_batch
from legato.runtime.draw import CHOICES, Draw, PlainDraw, Variant
from legato.runtime.graphs import Graphs, Key, Seats, buckets
from legato.runtime.rows import Rows
from legato.runtime.speculate import Iteration, Verified


class Decoder:
    """Decodes the rows that are seated. One number of drafts for all: K of the iteration."""

    def __init__(self, iteration: Iteration, rows: Rows, settings: Resolved) -> None:
        self._iteration, self._rows, self._score_bytes = iteration, rows, settings.score_bytes
        self.buckets = buckets(settings.max_running)
        self.seats = Seats(self.buckets[-1], rows.tokens.device)
        self.graphs = Graphs()
        self._layouts = {size: Layout.of(size, iteration.num_drafts, rows.tokens.device) for size in self.buckets}

    def key(self, bucket: int, variant: Variant) -> Key:
        """What a graph for this bucket is kept under."""
        return Key(bucket, self._iteration.num_drafts, variant)

    def keys(self) -> tuple[Key, ...]:
        """The graphs that serve every batch, the largest first: the smaller ones then fit into its memory."""
        return tuple(self.key(bucket, variant) for bucket in reversed(self.buckets) for variant in CHOICES)

    def has_graph(self, bucket: int, variant: Variant) -> bool:
        """Whether `launch` can serve this."""
        return self.key(bucket, variant) in self.graphs

    def run(self, bucket: int, draw: Draw) -> Verified:
        """One iteration of the first `bucket` places, launched kernel by kernel. This is what graphs are made of."""
        places = self.seats.places[:bucket]
        batch = decode_batch(places, self._rows, self._iteration.target.spec, self._layouts[bucket])
        _, verified = self._iteration.run(batch.within(self._score_bytes), self._rows, draw)
        assert verified is not None, "a decode batch samples"
        return verified

    def launch(self, bucket: int, variant: Variant) -> tuple[Tensor, int]:
        """The same as one graph; returns where the letter will be, and its number (see `Mailbox.post`)."""
        return self.graphs.launch(self.key(bucket, variant))

    def capture(self, key: Key) -> None:
        """Runs an iteration on padding alone, so that whatever is compiled or loaded lazily has been, then captures it."""
        self.seats.seat((0,))
        draw = PlainDraw(CHOICES[key.variant])
        self.run(key.bucket, draw)
        torch.cuda.synchronize()
        self.graphs.capture(key, lambda: self.run(key.bucket, draw))
