"""How the result of an iteration reaches the host: packed on the device, copied on a stream of its own, read without a wait
in the driver.

Owns the rings that iterations write (`Ring`), the pinned memory that letters arrive in (`Mailbox`), and the polling. Knows
neither plans nor graphs. Called by the runner (`post`) and by flights (`read`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.ops import LETTER_EXTRA, write_letter
from legato.runtime.speculate import Verified

DEPTH = 8
"""Letters that may be on their way or unread; the loop never has more than four, two of each plan."""
POLL_S = 20e-6
"""Between two looks at a letter that has not arrived; the iteration behind it is running meanwhile."""


@dataclass(frozen=True, slots=True)
class Line:
    """What an iteration brought to one request, as in `legato.runtime.speculate.Verified`; `drafts` are the next iteration's."""

    sampled: tuple[int, ...]
    drafts: tuple[int, ...]
    count: int
    accepted: int
    offered: int
    done: bool
    live: bool


@dataclass(frozen=True, slots=True)
class Written:
    """A letter on the device: its lines [B, R + K + LETTER_EXTRA], the number it must carry, and R."""

    lines: Tensor
    number: int
    num_tokens: int


class Ring:
    """Letters on the device, for B requests with R tokens and K drafts each: what iterations write in turn, and what is copied to
    the host."""

    def __init__(self, num_requests: int, num_tokens: int, num_drafts: int, device: torch.device) -> None:
        width = num_tokens + num_drafts + LETTER_EXTRA
        self._letters = torch.zeros((DEPTH, num_requests, width), dtype=torch.int64, device=device)
        self._num_tokens = num_tokens
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._written = 0

    def write(self, verified: Verified) -> None:
        """Issues the writing of the next letter; a graph may hold it."""
        write_letter(
            self._letters,
            self._number,
            verified.sampled,
            verified.drafts,
            verified.counts,
            verified.accepted,
            verified.offered,
            verified.done,
            verified.live,
        )

    def take(self) -> Written:
        """The letter of the next `write` that has been issued."""
        self._written += 1
        return Written(self._letters[self._written % DEPTH], self._written, self._num_tokens)


class MailboxError(RuntimeError):
    """A letter that is not the expected one: the device and the host no longer agree on what has run."""


@dataclass(slots=True)
class Letter:
    """The lines of one iteration, there or on their way. `number` is what the device must have written into them, `num_tokens`
    the R of each line; `source` keeps what is being copied until it has been read: no device memory is held from then on.
    `before`: the event behind the letter before this one."""

    lines: Tensor
    number: int
    num_tokens: int
    sent: torch.cuda.Event | None
    source: Tensor | None
    before: torch.cuda.Event | None = None
    found: list[Line] | None = None

    @property
    def is_read(self) -> bool:
        """Whether its place may be used again."""
        return self.found is not None

    def read(self) -> list[Line]:
        """Waits for the letter, if need be, by looking at it again and again. What was read once is kept.

        Raises:
            MailboxError: the device wrote another number.
            RuntimeError: the device has failed.
        """
        if self.found is None:
            while self.sent is not None and not self.sent.query():
                time.sleep(POLL_S)
            lines: list[list[int]] = self.lines.tolist()
            self.found, self.source = [self._line(line) for line in lines], None
        return self.found

    def seconds(self) -> float | None:
        """How long after the letter before it this one came, by the device's clock; `None` where there is none of the two. Only
        of a letter that has been read, and before its place is used again."""
        if self.sent is None or self.before is None:
            return None
        return self.before.elapsed_time(self.sent) / 1e3

    def _line(self, line: list[int]) -> Line:
        count, accepted, offered, done, live, number = line[-LETTER_EXTRA:]
        if number != self.number:
            raise MailboxError(f"letter {self.number} arrived as {number}")
        split = self.num_tokens
        sampled, drafts = tuple(line[:split]), tuple(line[split:-LETTER_EXTRA])
        return Line(sampled, drafts, count, accepted, offered, bool(done), bool(live))


class Mailbox:
    """A ring of pinned memory for letters of up to `most_requests` lines of up to `most_tokens` tokens and drafts.

    On a CPU nothing travels: a letter is read where it was written.
    """

    def __init__(self, most_requests: int, most_tokens: int, device: torch.device) -> None:
        self._device, self._posted = device, 0
        self._letters: list[Letter | None] = [None] * DEPTH
        if device.type == "cuda":
            self._ring = torch.zeros(
                (DEPTH, most_requests * (most_tokens + LETTER_EXTRA)), dtype=torch.int64, pin_memory=True
            )
            self._stream = torch.cuda.Stream(device)
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(DEPTH)]

    def post(self, written: Written) -> Letter:
        """Sends a ring's letter, behind what has been issued on the current stream, which goes on meanwhile.

        Raises:
            MailboxError: all places hold letters that nobody has read.
        """
        place = self._posted % DEPTH
        before = self._letters[place]
        if before is not None and not before.is_read:
            raise MailboxError(f"{DEPTH} letters wait to be read; the next has no place")
        self._posted += 1
        letter = self._send(place, written)
        self._letters[place] = letter
        return letter

    def _send(self, place: int, written: Written) -> Letter:
        source = written.lines
        if self._device.type == "cpu":
            return Letter(source, written.number, written.num_tokens, None, source)
        lines = self._ring[place, : source.numel()].view(source.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            lines.copy_(source, non_blocking=True)
            self._events[place].record(self._stream)
        before = self._events[place - 1] if self._posted > 1 else None  # the place before the first is the last
        return Letter(lines, written.number, written.num_tokens, self._events[place], source, before)
