"""How many layers of a prompt fit between two iterations of the requests that decode.

Owns what iterations have cost: those that only decode, and each layer of a prompt that they carried further. Seconds are handed
in; no clock is read here. Called by the scheduler.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from legato.plan import Plan

END_LAYERS = 2
"""Before it is known: what comes behind the last layer (the draft layer over the same rows, the head, the chain), in layers."""
FIRST_SHARE = 16
"""Before anything is known, one layer in so many."""
AIM = 0.9
"""Of the time that a prompt may take, what is planned: iterations differ."""
KEPT = 16
"""Iterations without a prompt, of which the median counts: one in front of a prompt comes back late, because the host is busy
with launching that."""
SMOOTHING = 0.5
"""Of what an iteration took longer than expected, what is believed."""


@dataclass(slots=True)
class _Pass:
    """What a prompt of about so many rows costs in each layer, and behind the last one; `None` where it has not been there."""

    layers: list[float | None]
    latest: float = 0.0

    def cost(self, layer: int) -> float:
        """Seconds of a layer, or of what comes behind the last; what is not known costs as a layer of the latest plan did."""
        known = self.layers[layer]
        if known is not None:
            return known
        return self.latest * (END_LAYERS if layer == len(self.layers) - 1 else 1)

    def observe(self, layers: range, seconds: float) -> None:
        """What these layers took together: each is corrected by the same share.

        What takes less than expected is believed at once, since nothing makes an iteration too short; what takes more may be the
        host's doing, and is believed bit by bit.
        """
        expected = sum(self.cost(layer) for layer in layers)
        weights = [END_LAYERS if layer == len(self.layers) - 1 else 1 for layer in layers]
        self.latest = seconds / sum(weights)
        if not expected:
            for layer, weight in zip(layers, weights, strict=True):
                self.layers[layer] = self.latest * weight
            return
        part = 1.0 if seconds < expected else SMOOTHING
        factor = 1 + part * (seconds / expected - 1)
        for layer in layers:
            self.layers[layer] = self.cost(layer) * factor


@dataclass(slots=True)
class Pace:
    """Of a target of `num_layers` layers. With `slowdown` 0 prompts are never cut; else an iteration that carries a part of one
    takes at most so many times what it takes alone."""

    num_layers: int
    slowdown: float
    _alone: dict[tuple[int, int], deque[float]] = field(default_factory=dict[tuple[int, int], "deque[float]"])
    _passes: dict[int, _Pass] = field(default_factory=dict[int, _Pass])

    @property
    def cuts(self) -> bool:
        """Whether prompts are cut at all."""
        return self.slowdown > 0 and self.num_layers > 1

    def stop(self, start: int, num_rows: int, num_decoding: int, num_drafts: int) -> int:
        """Where a pass of `num_rows` rows stops that goes on at layer `start` beside `num_decoding` requests with K drafts: at
        least one layer further; behind the last only with all that follows it."""
        alone, known = self._decode_s(num_decoding, num_drafts), self._pass(size_class(num_rows))
        if alone is None or known is None:
            return min(start + max(1, self.num_layers // FIRST_SHARE), max(self.num_layers - 1, start + 1))
        left = AIM * (self.slowdown - 1) * alone
        for layer in range(start, self.num_layers):
            is_last = layer == self.num_layers - 1
            left -= known.cost(layer) + (known.cost(self.num_layers) if is_last else 0.0)
            if left < 0 and layer > start:
                return layer
        return self.num_layers

    def observe(self, plan: Plan, seconds: float) -> None:
        """What a plan took, from the end of the one before it to its own."""
        if not self.cuts or not plan.decodes:
            return
        if not plan.extends:
            key = size_class(len(plan.decodes)), plan.num_drafts
            self._alone.setdefault(key, deque(maxlen=KEPT)).append(seconds)
            return
        alone = self._decode_s(len(plan.decodes), plan.num_drafts)
        if alone is None or seconds <= alone:
            return
        layers = range(self.num_layers) if plan.layers is None else plan.layers
        if layers.stop == self.num_layers:  # and what comes behind
            layers = range(layers.start, self.num_layers + 1)
        rows = size_class(sum(len(extend.tokens) for extend in plan.extends))
        if rows not in self._passes:
            self._passes[rows] = _Pass([None] * (self.num_layers + 1))
        self._passes[rows].observe(layers, seconds - alone)

    def _decode_s(self, num_decoding: int, num_drafts: int) -> float | None:
        """Seconds of an iteration without a prompt: of so many requests, or of the next smaller number that is known."""
        size = size_class(num_decoding)
        known = max((other for other, drafts in self._alone if drafts == num_drafts and other <= size), default=None)
        return None if known is None else statistics.median(self._alone[known, num_drafts])

    def _pass(self, rows: int) -> _Pass | None:
        """Of so many rows, or of the next larger number that is known, or of the largest."""
        if not self._passes:
            return None
        return self._passes[min((size for size in self._passes if size >= rows), default=max(self._passes))]


def size_class(count: int) -> int:
    """Numbers that cost about the same share an entry: the next power of two."""
    return 1 << (count - 1).bit_length()
