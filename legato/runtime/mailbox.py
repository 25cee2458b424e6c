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
"""Letters that may be on their way or unread; the loop never has more than two."""
POLL_S = 20e-6
"""Between two looks at a letter that has not arrived; the iteration behind it is running meanwhile."""


@dataclass(frozen=True, slots=True)
class Line:
    """What an iteration brought to one request, as in `legato.runtime.speculate.Verified`."""

    sampled: tuple[int, ...]
    count: int
    accepted: int
    done: bool
    live: bool


class Ring:
    """Letters on the device, for B requests with R tokens each: what iterations write in turn, and what is copied to the host."""

    def __init__(self, num_requests: int, num_tokens: int, device: torch.device) -> None:
        self._letters = torch.zeros((DEPTH, num_requests, num_tokens + LETTER_EXTRA), dtype=torch.int64, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._written = 0

    def write(self, verified: Verified) -> None:
        """Issues the writing of the next letter; a graph may hold it."""
        write_letter(
            self._letters,
            self._number,
            verified.sampled,
            verified.counts,
            verified.accepted,
            verified.done,
            verified.live,
        )

    def take(self) -> tuple[Tensor, int]:
        """The letter [B, R + LETTER_EXTRA] of the next `write` that has been issued, and its number."""
        self._written += 1
        return self._letters[self._written % DEPTH], self._written


class MailboxError(RuntimeError):
    """A letter that is not the expected one: the device and the host no longer agree on what has run."""


@dataclass(slots=True)
class Letter:
    """The lines of one iteration, there or on their way. `number` is what the device must have written into them; `source` keeps
    what is being copied until it has been read."""

    lines: Tensor
    number: int
    sent: torch.cuda.Event | None
    source: Tensor | None
    is_read: bool = False

    def read(self) -> list[Line]:
        """Waits for the letter, if need be, by looking at it again and again.

        Raises:
            MailboxError: the device wrote another number.
            RuntimeError: the device has failed.
        """
        while self.sent is not None and not self.sent.query():
            time.sleep(POLL_S)
        lines: list[list[int]] = self.lines.tolist()
        self.is_read, self.source = True, None
        for line in lines:
            if line[-1] != self.number:
                raise MailboxError(f"letter {self.number} arrived as {line[-1]}")
        return [Line(tuple(line[:-LETTER_EXTRA]), line[-5], line[-4], bool(line[-3]), bool(line[-2])) for line in lines]


class Mailbox:
    """A ring of pinned memory for letters of up to `most_requests` lines of up to `most_tokens` tokens.

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
            self._events = [torch.cuda.Event() for _ in range(DEPTH)]

    def post(self, written: Tensor, number: int) -> Letter:
        """Sends a ring's letter, behind what has been issued on the current stream, which goes on meanwhile.

        Raises:
            MailboxError: all places hold letters that nobody has read.
        """
        place = self._posted % DEPTH
        before = self._letters[place]
        if before is not None and not before.is_read:
            raise MailboxError(f"{DEPTH} letters wait to be read; the next has no place")
        self._posted += 1
        letter = self._send(place, written, number)
        self._letters[place] = letter
        return letter

    def _send(self, place: int, written: Tensor, number: int) -> Letter:
        if self._device.type == "cpu":
            return Letter(written, number, None, written)
        lines = self._ring[place, : written.numel()].view(written.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            lines.copy_(written, non_blocking=True)
            self._events[place].record(self._stream)
        return Letter(lines, number, self._events[place], written)
