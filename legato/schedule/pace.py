"""How many layers of a prompt fit between two iterations of the requests that decode.

Owns what iterations have cost: those that only decode, and each kind of layer of a prompt that they carried further. Seconds are
handed in; no clock is read here. Called by the scheduler.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from legato.plan import Plan

START, END = "start", "end"
"""Kinds of the first layer with what comes before it, and of what comes behind the last: the draft layer over the same rows, the
head, the chain."""
UNKNOWN = 2.0
"""How many layers one counts of a kind that has not been seen."""
AIM = 0.93
"""Of the time that a prompt may take, what is planned: iterations differ."""
KEPT = 16
"""Iterations without a prompt, of which the median counts: one in front of a prompt comes back late, because the host is busy
with launching that."""
SMOOTHING = 0.5
"""Of what an iteration took longer than expected, what is believed."""
TRIES = 4
"""Plans that run without a prompt, at most, for it to be known what they take alone: one is in the air when the next is made."""


@dataclass(slots=True)
class _Pass:
    """What a layer of each kind costs a prompt of about so many rows; `latest`: a layer of the newest plan."""

    latest: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict[str, float])

    def cost(self, kind: str) -> float:
        """Seconds of a layer of a kind."""
        return self.kinds.get(kind, UNKNOWN * self.latest)

    def observe(self, kinds: Sequence[str], seconds: float) -> None:
        """What layers of these kinds took together. Of kinds that are new it is what the others leave; else each is corrected by
        the same share.

        What takes less than expected is believed at once, since nothing makes an iteration too short; what takes more may be the
        host's doing, and is believed bit by bit.
        """
        self.latest = seconds / len(kinds)
        new = [kind for kind in kinds if kind not in self.kinds]
        if new:
            rest = seconds - sum(self.kinds.get(kind, 0.0) for kind in kinds)
            self.kinds |= dict.fromkeys(new, rest / len(new) if rest > 0 else self.latest)
            return
        factor = seconds / sum(map(self.cost, kinds))
        if factor > 1:
            factor = 1 + SMOOTHING * (factor - 1)
        self.kinds |= {kind: factor * self.cost(kind) for kind in kinds}


@dataclass(slots=True)
class Pace:
    """Of a target whose layers are of these kinds, in order. What comes behind them counts as one layer more.

    With `slowdown` 0 prompts are never cut; else an iteration that carries a part of one takes at most so many times what it
    takes alone.
    """

    layers: Sequence[str]
    slowdown: float
    _alone: dict[tuple[int, int], deque[float]] = field(default_factory=dict[tuple[int, int], "deque[float]"])
    _passes: dict[int, _Pass] = field(default_factory=dict[int, _Pass])
    _tried: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])

    @property
    def cuts(self) -> bool:
        """Whether prompts are cut at all."""
        return self.slowdown > 0 and len(self.layers) > 1

    @property
    def end(self) -> int:
        """Where a pass is over: all layers, and what comes behind them."""
        return len(self.layers) + 1

    def goes_alone(self, num_decoding: int, num_drafts: int) -> bool:
        """Whether the next plan of so many requests shall carry no prompt, because none of them is known that did not."""
        key = size_class(num_decoding), num_drafts
        if not self.cuts or not num_decoding or key in self._alone:
            return False
        self._tried[key] += 1
        return self._tried[key] <= TRIES

    def stop(self, start: int, num_rows: int, num_decoding: int, num_drafts: int) -> int:
        """Where a pass of `num_rows` rows stops that goes on at layer `start` beside `num_decoding` requests with K drafts: one
        layer further, and as many more as are known to fit."""
        alone, costs = self._decode_s(num_decoding, num_drafts), self._costs(range(start, self.end), num_rows)
        if alone is None or costs is None:
            return start + 1
        most = AIM * (self.slowdown - 1) * alone
        over = (layer for layer, needed in enumerate(accumulate(costs), start) if needed > most and layer > start)
        return next(over, self.end)

    def expected(self, plan: Plan) -> float | None:
        """Seconds that a plan will take; `None` as long as nothing is known of what it does."""
        alone = self._decode_s(len(plan.decodes), plan.num_drafts)
        if alone is None or not plan.extends:
            return alone
        costs = self._costs(self._layers(plan), _num_rows(plan))
        return None if costs is None else alone + sum(costs)

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
        kinds = self._kinds(self._layers(plan))
        self._passes.setdefault(size_class(_num_rows(plan)), _Pass()).observe(kinds, seconds - alone)

    def _decode_s(self, num_decoding: int, num_drafts: int) -> float | None:
        """Seconds of an iteration without a prompt: of so many requests, or of the next smaller number that is known."""
        size = size_class(num_decoding)
        known = max((other for other, drafts in self._alone if drafts == num_drafts and other <= size), default=None)
        return None if known is None else statistics.median(self._alone[known, num_drafts])

    def _costs(self, layers: range, num_rows: int) -> list[float] | None:
        """Seconds of a prompt's rows in each layer: as so many, or the next larger number that is known, took; or in proportion
        to the largest that is known."""
        if not self._passes:
            return None
        rows = size_class(num_rows)
        size = min((size for size in self._passes if size >= rows), default=max(self._passes))
        return [max(1.0, rows / size) * self._passes[size].cost(kind) for kind in self._kinds(layers)]

    def _kinds(self, layers: range) -> list[str]:
        kinds = (START, *self.layers[1:], END)
        return [kinds[layer] for layer in layers]

    def _layers(self, plan: Plan) -> range:
        return range(self.end) if plan.layers is None else plan.layers


def size_class(count: int) -> int:
    """Numbers that cost about the same share an entry: the next power of two."""
    return 1 << (count - 1).bit_length()


def _num_rows(plan: Plan) -> int:
    return sum(len(extend.tokens) for extend in plan.extends)
