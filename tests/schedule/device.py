"""A stand-in for the device: a toy language model over paged memory that notices every wrong page.

Each slot remembers the text up to its position (as a hash) and the token after it, as a target's and a draft layer's cache do.
So a page that was shared wrongly, written by two, or reused too early gives other text or a failed check, not silence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from legato.plan import Admit, Emission, Extend, Move, Offload, Outcome, Plan
from legato.schedule import Limits

EOS = 99
WORDS = 3


def advance(state: int, token: int) -> int:
    return hash((state, token))


def next_token(seed: int, state: int) -> int:
    """A word, or now and then the end; with a negative seed the text goes on to its limit."""
    value = hash((seed, state, 7)) % 1000
    return EOS if value < 15 and seed >= 0 else value % WORDS


def reference(prompt: tuple[int, ...], seed: int, limit: int) -> Iterator[int]:
    """The only right answer: what the toy model writes alone, without pages, drafts or chunks."""
    state = 0
    for token in prompt:
        state = advance(state, token)
    for _ in range(limit):
        token = next_token(seed, state)
        yield token
        if token == EOS:
            return
        state = advance(state, token)


@dataclass
class Row:
    admit: Admit
    pages: list[int]
    length: int = 0
    newest: int | None = None
    done: bool = False


@dataclass
class Device:
    """Runs plans as the runner would: owns lengths, cuts at ends, limits and capacity, freezes finished rows."""

    limits: Limits
    rows: dict[int, Row] = field(default_factory=dict)
    memory: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    host: dict[int, list[tuple[int, int] | None]] = field(default_factory=dict)
    held: tuple[tuple[Extend, ...], int] = ((), 0)
    num_stalls: int = 0
    num_restored: int = 0

    def run(self, plan: Plan, luck: random.Random) -> Outcome:
        for move in plan.moves:
            self._move(move)
        for admit in plan.admits:
            assert 0 not in admit.pages
            self.rows[admit.row] = Row(admit, list(admit.pages))
        for grant in plan.grants:
            row = self.rows[grant.row]
            assert grant.first == len(row.pages), "pages are appended"
            row.pages += grant.pages
        ran = plan.extends if self._is_through(plan) else ()
        emissions = [emission for extend in ran for emission in self._extend(extend)]
        drafts = self.limits.num_drafts
        emissions += [
            self._decode(number, luck.choice((0, drafts, luck.randint(0, drafts)))) for number in plan.decodes
        ]
        return Outcome(plan.epoch, tuple(emissions))

    def _is_through(self, plan: Plan) -> bool:
        """Whether the plan's chunks have come to the end, behind all layers: only then may anyone read what they wrote."""
        end = len(self.limits.layers) + 1
        layers = range(end) if plan.layers is None else plan.layers
        assert 0 <= layers.start < layers.stop <= end
        assert not plan.extends or layers.start == 0 or self.held == (plan.extends, layers.start), (
            "a pass that is not here"
        )
        for extend in plan.extends:  # as if every layer stored all over again: what was there before is lost
            row, stop = self.rows[extend.row], extend.start + len(extend.tokens)
            row.length = row.length or extend.start
            assert stop <= self.capacity(row), "a prompt reaches past its pages"
            self.memory.update((self._slot(row, position), None) for position in range(extend.start, stop))
        self.held = (plan.extends, layers.stop) if plan.extends and layers.stop < end else ((), 0)
        return layers.stop == end

    def _move(self, move: Move) -> None:
        """Carries a page out or in. What it leaves behind is gone: nobody may read it there."""
        slots = range(move.page * self.limits.page_size, (move.page + 1) * self.limits.page_size)
        if isinstance(move, Offload):
            self.host[move.slot] = [self.memory.pop(slot) for slot in slots]
        else:
            self.memory.update(zip(slots, self.host.pop(move.slot), strict=True))
            self.num_restored += 1

    def capacity(self, row: Row) -> int:
        return len(row.pages) * self.limits.page_size

    def writes(self, number: int, start: int, count: int) -> set[int]:
        """Pages that `count` rows from position `start` on may write."""
        row = self.rows[number]
        stop = min(start + count, self.capacity(row))
        return {row.pages[position // self.limits.page_size] for position in range(start, stop)}

    def _slot(self, row: Row, position: int) -> int:
        page = row.pages[position // self.limits.page_size]
        return page * self.limits.page_size + position % self.limits.page_size

    def _state(self, row: Row, position: int) -> int:
        if position < 0:
            return 0
        entry = self.memory[self._slot(row, position)]
        assert entry is not None, "a rejected draft was read"
        return entry[0]

    def _check(self, row: Row, following: int | None) -> None:
        """Everything that the row reads is the row's own text, and the last draft row knows the token that really follows."""
        state, token = 0, None
        for position in range(row.length):
            entry = self.memory[self._slot(row, position)]
            assert entry is not None, "a rejected draft was read"
            if token is not None:
                assert entry[0] == advance(state, token), "a page of another text"
            state, token = entry
        if row.length:
            assert token == following, "the draft layer's last row was made for another next token"

    def _extend(self, extend: Extend) -> list[Emission]:
        row = self.rows[extend.row]
        if not row.length:
            assert extend.start % self.limits.page_size == 0
            row.length = extend.start
        assert extend.start == row.length, "chunks follow each other without gap or overlap"
        self._check(row, extend.tokens[0])
        assert row.length + len(extend.tokens) <= self.capacity(row), "a prompt reaches past its pages"
        sampled = 0
        for place, token in enumerate(extend.tokens):
            state = advance(self._state(row, row.length - 1), token)
            following = extend.tokens[place + 1] if place + 1 < len(extend.tokens) else extend.next_token
            sampled = next_token(row.admit.seed, state) if following is None else following
            self.memory[self._slot(row, row.length)] = (state, sampled)
            row.length += 1
        if extend.next_token is not None:
            return []
        return [self._emit(extend.row, [sampled], 0, 0)]

    def _decode(self, number: int, accepted: int) -> Emission:
        row, drafts = self.rows[number], self.limits.num_drafts
        if row.done:
            return Emission(number, (), True, 0, 0)
        self._check(row, row.newest)
        tokens: list[int] = []
        token, position = row.newest, row.length
        while len(tokens) <= accepted and position < min(self.capacity(row), row.admit.max_length - 1):
            assert token is not None
            state = advance(self._state(row, position - 1), token)
            token = next_token(row.admit.seed, state)
            self.memory[self._slot(row, position)] = (state, token)
            tokens.append(token)
            position += 1
            if token in row.admit.stop_ids:
                break
        self.num_stalls += position == self.capacity(row) and len(tokens) <= accepted
        for rejected in range(position, min(row.length + drafts + 1, self.capacity(row))):
            self.memory[self._slot(row, rejected)] = None
        row.length = position
        return self._emit(number, tokens, accepted, drafts)

    def _emit(self, number: int, tokens: list[int], accepted: int, drafted: int) -> Emission:
        row = self.rows[number]
        if tokens:
            row.newest = tokens[-1]
            row.done = tokens[-1] in row.admit.stop_ids or row.length + 1 >= row.admit.max_length
        return Emission(number, tuple(tokens), row.done, accepted, drafted)
