"""How many layers of a prompt fit between two iterations of the requests that decode.

Owns what iterations have cost: those that only decode, and each kind of layer of a prompt that they carried further. Seconds are
handed in; no clock is read here. Called by the scheduler.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from legato.plan import Extend, Plan

START, END = "start", "end"
"""Kinds of the first layer with what comes before it, and of what comes behind the last: the draft layer over the same rows, the
head, the chain."""
UNKNOWN = 2.0
"""How many layers one counts of a kind that has not been seen."""
SURE = 2.33
"""Standard deviations that are planned for: 99 of 100 plans keep to the time that a prompt may take."""
NEW, DRIFT, SCATTER = 0.5, 0.02, 0.02
"""Standard deviations, as shares: of a kind's cost as first seen, of what it changes from one plan to the next (index scores grow
with what stands before), and of what a plan takes besides."""
SURPRISE = 3.0
"""Standard deviations beyond which costs are taken to be as little known as when first seen; of what takes longer than even these
allow, nothing is believed: the host was late."""
LEAST = 0.05
"""Of a kind's cost: what one plan leaves of it at least, whatever it took."""
KEPT = 16
"""Iterations without a prompt, of which the median counts: one in front of a prompt comes back late, because the host is busy
with launching that."""
LATE = 0.8
"""Of what iterations took alone: what carries a prompt in less than that says that those had come late. More may be scatter."""
TRIES = 4
"""Plans that run without a prompt, at most, for it to be known what they take alone: one is in the air when the next is made."""


@dataclass(slots=True)
class _Pass:
    """What a layer of each kind costs a prompt of about so many rows, and how well that is known: a Kalman filter, which is told
    what layers took together. `latest`: a layer of the newest plan."""

    latest: float = 0.0
    costs: dict[str, float] = field(default_factory=dict[str, float])
    covariance: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def expected(self, kinds: Mapping[str, int]) -> float:
        """Seconds of so many layers of each kind."""
        return sum(count * self.costs.get(kind, UNKNOWN * self.latest) for kind, count in kinds.items())

    def deviation(self, kinds: Mapping[str, int]) -> float:
        """Standard deviation of what a plan of so many layers of each kind takes, in seconds: what is not known, and scatter."""
        return math.sqrt(self._variance(kinds) + (SCATTER * self.expected(kinds)) ** 2)

    def observe(self, kinds: Mapping[str, int], seconds: float) -> None:
        """What so many layers of each kind took together. Of kinds that are new it is what the others leave."""
        self.latest = seconds / sum(kinds.values())
        new = {kind: count for kind, count in kinds.items() if kind not in self.costs}
        if new:
            rest = seconds - sum(count * self.costs.get(kind, 0.0) for kind, count in kinds.items())
            each = rest / sum(new.values()) if rest > 0 else self.latest
            self.costs |= dict.fromkeys(new, each)
            self.covariance |= {(kind, kind): (NEW * each) ** 2 for kind in new}
            return
        for kind, cost in self.costs.items():
            self.covariance[kind, kind] += (DRIFT * cost) ** 2
        surprise = seconds - self.expected(kinds)
        if abs(surprise) > SURPRISE * self.deviation(kinds):
            mean = self.expected(kinds) / sum(kinds.values())  # a kind that is taken as too cheap may be the one
            for kind in kinds:
                new_variance = (NEW * max(self.costs[kind], mean)) ** 2
                self.covariance[kind, kind] = max(self.covariance[kind, kind], new_variance)
        deviation = self.deviation(kinds)
        surprise = min(surprise, SURPRISE * deviation)
        shares = {kind: self._covariance(kind, kinds) / deviation for kind in self.costs}
        for kind, share in shares.items():
            self.costs[kind] = max(LEAST * self.costs[kind], self.costs[kind] + share / deviation * surprise)
            for other, others in shares.items():
                self.covariance[kind, other] = self.covariance.get((kind, other), 0.0) - share * others

    def _covariance(self, kind: str, kinds: Mapping[str, int]) -> float:
        """Of a layer of a kind with so many of each."""
        return sum(count * self.covariance.get((kind, other), 0.0) for other, count in kinds.items())

    def _variance(self, kinds: Mapping[str, int]) -> float:
        return max(0.0, sum(count * self._covariance(kind, kinds) for kind, count in kinds.items()))


Rows = tuple[bool, int]
"""Whether they are the end of one prompt that runs as graphs, and about how many they are."""


@dataclass(slots=True)
class Pace:
    """Of a target whose layers are of these kinds, in order. What comes behind them counts as one layer more.

    With `slowdown` 0 prompts are never cut; else an iteration that carries a part of one takes at most so many times what it
    takes alone. Ends of prompts of up to `end_rows` rows run as graphs of `end_layers` layers each (see `Limits`).
    """

    layers: Sequence[str]
    slowdown: float
    end_rows: int = 0
    end_layers: int = 1
    _alone: dict[tuple[int, int], deque[float]] = field(default_factory=dict[tuple[int, int], "deque[float]"])
    _passes: dict[Rows, _Pass] = field(default_factory=dict[Rows, _Pass])
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

    def stop(self, start: int, extends: Sequence[Extend], num_decoding: int, num_drafts: int) -> int:
        """Where a pass of these chunks stops that goes on at layer `start` beside `num_decoding` requests with K drafts: one
        layer further, or where the first graph ends, and as much further as is known to fit."""
        rows = self._rows(extends)
        stops = self._stops(start, rows)
        alone, known = self._decode_s(num_decoding, num_drafts), self._known(rows)
        if alone is None or known is None:
            return stops[0]
        most, (passes, scale) = (self.slowdown - 1) * alone, known

        def at_most(stop: int) -> float:
            kinds = self._kinds(range(start, stop))
            return scale * (passes.expected(kinds) + SURE * passes.deviation(kinds))

        return stops[max(0, bisect_right(stops, most, key=at_most) - 1)]

    def expected(self, plan: Plan) -> float | None:
        """Seconds that a plan will take; `None` as long as nothing is known of what it does."""
        alone = self._decode_s(len(plan.decodes), plan.num_drafts)
        if alone is None or not plan.extends:
            return alone
        known = self._known(self._rows(plan.extends))
        return None if known is None else alone + known[1] * known[0].expected(self._kinds(self._layers(plan)))

    def observe(self, plan: Plan, seconds: float) -> None:
        """What a plan took, from the end of the one before it to its own."""
        if not self.cuts or not plan.decodes:
            return
        if not plan.extends:
            key = size_class(len(plan.decodes)), plan.num_drafts
            self._alone.setdefault(key, deque(maxlen=KEPT)).append(seconds)
            return
        alone, rows = self._decode_s(len(plan.decodes), plan.num_drafts), self._rows(plan.extends)
        if alone is None:
            return
        if seconds > alone:
            self._passes.setdefault(rows, _Pass()).observe(self._kinds(self._layers(plan)), seconds - alone)
        elif seconds < LATE * alone and self._known(rows) is None:  # while it is believed, no layer costs anything
            key = self._timed(len(plan.decodes), plan.num_drafts)
            assert key is not None
            del self._alone[key]
            self._tried[size_class(len(plan.decodes)), plan.num_drafts] = 0

    def _timed(self, num_decoding: int, num_drafts: int) -> tuple[int, int] | None:
        """Of iterations without a prompt that are known: those of so many requests, or of the next smaller number."""
        size = size_class(num_decoding)
        return max((key for key in self._alone if key[1] == num_drafts and key[0] <= size), default=None)

    def _decode_s(self, num_decoding: int, num_drafts: int) -> float | None:
        """Seconds of an iteration without a prompt."""
        key = self._timed(num_decoding, num_drafts)
        return None if key is None else statistics.median(self._alone[key])

    def _rows(self, extends: Sequence[Extend]) -> Rows:
        """What these chunks cost about as much as."""
        count = sum(len(extend.tokens) for extend in extends)
        is_end = len(extends) == 1 and extends[0].next_token is None and count <= self.end_rows
        return is_end, size_class(count)

    def _stops(self, start: int, rows: Rows) -> Sequence[int]:
        """Where a pass may stop that goes on at `start`."""
        is_end, last = rows[0], len(self.layers)
        stops = range(start + 1, self.end + 1)
        return [stop for stop in stops if stop >= last or stop % self.end_layers == 0] if is_end else stops

    def _known(self, rows: Rows) -> tuple[_Pass, float] | None:
        """What chunks of so many rows cost, and times how much: as so many, or the next larger number that is known, took; or in
        proportion to the largest that is known. Ends as other chunks did, as long as no end has run."""
        is_end, count = rows
        passes = {size: some for (kind, size), some in self._passes.items() if kind == is_end}
        passes = passes or {size: some for (_, size), some in self._passes.items()}
        if not passes:
            return None
        size = min((size for size in passes if size >= count), default=max(passes))
        return passes[size], max(1.0, count / size)

    def _kinds(self, layers: range) -> Counter[str]:
        """How many layers of each kind."""
        kinds = (START, *self.layers[1:], END)
        return Counter(kinds[layer] for layer in layers)

    def _layers(self, plan: Plan) -> range:
        return range(self.end) if plan.layers is None else plan.layers


def size_class(count: int) -> int:
    """Numbers that cost about the same share an entry: the next power of two."""
    return 1 << (count - 1).bit_length()
