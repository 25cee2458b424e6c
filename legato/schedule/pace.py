"""How many layers of a prompt fit between two iterations of the requests that decode.

Owns what iterations have cost: those that only decode, and those that carry a prompt a few layers further. Seconds are handed in;
no clock is read here. Called by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from legato.plan import Plan

TAIL_LAYERS = 2
"""What comes behind the last layer (the draft layer over the same rows, the head, the chain) costs about as much."""
FIRST_SHARE = 16
"""Before anything is known, one layer in so many."""
AIM = 0.9
"""Of the time that a prompt may take, what is planned: iterations differ."""
SMOOTHING = 0.25


@dataclass(slots=True)
class Pace:
    """Of a target of `num_layers` layers. With `slowdown` 0 prompts are never cut; else an iteration that carries a part of one
    takes at most so many times what it takes alone."""

    num_layers: int
    slowdown: float
    _decode_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    _layer_s: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def cuts(self) -> bool:
        """Whether prompts are cut at all."""
        return self.slowdown > 0 and self.num_layers > 1

    def stop(self, start: int, num_rows: int, num_decoding: int, num_drafts: int) -> int:
        """Where a pass of `num_rows` rows stops that goes on at layer `start` beside `num_decoding` requests with K drafts."""
        count = self._affordable(num_rows, num_decoding, num_drafts)
        left = self.num_layers - start
        if left <= max(count - TAIL_LAYERS, 1):
            return self.num_layers
        return min(start + count, self.num_layers - 1)

    def observe(self, plan: Plan, seconds: float) -> None:
        """What a plan took, from the end of the one before it to its own."""
        if not self.cuts or not plan.decodes:
            return
        key = size_class(len(plan.decodes)), plan.num_drafts
        if not plan.extends:
            self._decode_s[key] = _smoothed(self._decode_s.get(key), seconds)
        elif (alone := self._decode_s.get(key)) is not None:
            layers = range(self.num_layers) if plan.layers is None else plan.layers
            count = len(layers) + (TAIL_LAYERS if layers.stop == self.num_layers else 0)
            rows = size_class(sum(len(extend.tokens) for extend in plan.extends))
            self._layer_s[rows] = _smoothed(self._layer_s.get(rows), max(seconds - alone, 0.0) / count)

    def _affordable(self, num_rows: int, num_decoding: int, num_drafts: int) -> int:
        """Layers for which there is time."""
        alone = self._decode_s.get((size_class(num_decoding), num_drafts))
        each = self._each(size_class(num_rows))
        if alone is None or not each:
            return max(1, self.num_layers // FIRST_SHARE)
        return max(1, int(AIM * (self.slowdown - 1) * alone / each))

    def _each(self, rows: int) -> float | None:
        """Seconds of a layer: of so many rows, or of the next larger number that is known, or of the largest."""
        if not self._layer_s:
            return None
        known = min((size for size in self._layer_s if size >= rows), default=max(self._layer_s))
        return self._layer_s[known]


def size_class(count: int) -> int:
    """Numbers that cost about the same share an entry: the next power of two."""
    return 1 << (count - 1).bit_length()


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
