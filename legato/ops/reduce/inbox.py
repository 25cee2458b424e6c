"""The memory that a rank's peers write into: its layout, and what it means that a wait was given up.

Owns the layout that `sm90_exchange.cuh` has too. Must not know how processes come to share memory, nor start a kernel. Made by
whoever maps the memory (`legato.parallel`), passed to the ops of this folder as their exchange.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from legato.ops.reduce import Exchange

MOST_RANKS = 8
#: Rows of one sum: each has a thread block, or where they are few several, and all of these must run at once.
MOST_ROWS = 128
#: 32-bit words of one gather: six rows of logits between two ranks of GLM-5.2, in float32, and 27 between eight.
MOST_WORDS = 1 << 19
#: Calls, one after the other, up to which rows or words that are more than one takes go through an inbox all the same.
MOST_CALLS = 4
#: Thread blocks of a gather at most, whose calls a header counts.
GATHER_BLOCKS = 64
HEADER_BYTES = 4096
#: Where in the header the longest wait stands, in nanoseconds (64 bits).
PATIENCE_AT = 8 * MOST_RANKS + 8
#: What an inbox is filled with before its header is written.
EMPTY_BYTE = 0xFF
#: Words of the alarm: missing ranks (bits), the rank that noticed + 1 (0: a peer did), call, thread block.
ALARM_WORDS = 4
_SUM_BUFFERS, _WORD_BUFFERS = 3, 2
#: What a GPU's links carry one way, in bytes a second, and how long a way across them takes: H200 (NOTES.md).
_LINK_RATE, _WAY_SECONDS = 450e9, 1.9e-6


class RankLostError(RuntimeError):
    """A rank did not take part in a collective in time. What that collective and later ones gave is NaN."""


def two_shots_pay_from(num_ranks: int, width: int) -> int | None:
    """From how many rows of `width` bfloat16 on a sum is sooner done in two shots, by what links carry: the bytes that are not
    sent would take as long as two ways across, and one way is gone more. None: no sum of one launch is."""
    saved = 2 * width * (num_ranks - 1) * (1 - 2 / num_ranks)
    rows = math.ceil(2 * _WAY_SECONDS * _LINK_RATE / saved) if saved else MOST_ROWS + 1
    return rows if rows <= MOST_ROWS else None


@dataclass(frozen=True)
class InboxShape:
    """How large the inboxes of an exchange are: calls of up to `rows` rows of `width` bfloat16 among `num_ranks` ranks.

    `two_shot_rows`: sums of at least so many rows go in two shots (None: no sum does), which brings the same bits over fewer
    bytes of the link and one way more across it. All ranks must say the same. Raises ValueError for what the kernels do not take.
    """

    num_ranks: int
    width: int
    rows: int = MOST_ROWS
    two_shot_rows: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= MOST_RANKS:
            raise ValueError(f"num_ranks: an exchange has 2 to {MOST_RANKS} ranks, got {self.num_ranks}")
        if not 1 <= self.rows <= MOST_ROWS:
            raise ValueError(f"rows: one sum has 1 to {MOST_ROWS} rows, got {self.rows}")
        if self.width < 1 or self.width % 8:
            raise ValueError(f"width: rows are made of pieces of 8 numbers, got {self.width}")
        if self.two_shot_rows is not None and self.two_shot_rows < 1:
            raise ValueError(f"two_shot_rows: sums have at least one row, got {self.two_shot_rows}")

    def is_two_shot(self, rows: int) -> bool:
        """Whether a sum of `rows` rows goes in two shots."""
        return self.two_shot_rows is not None and rows >= self.two_shot_rows

    @property
    def words_at(self) -> int:
        """Where the region of words begins."""
        return HEADER_BYTES + _SUM_BUFFERS * self.num_ranks * self.rows * self.width * 2

    @property
    def num_bytes(self) -> int:
        """Device memory of one rank's inbox."""
        return self.words_at + _WORD_BUFFERS * self.num_ranks * MOST_WORDS * 8

    def header(self, addresses: Sequence[int], alarm: int, patience_ns: int) -> bytes:
        """The first bytes of an inbox: where every rank's inbox and this rank's alarm are mapped, how long a wait lasts at
        most. Counts of calls start at zero."""
        if len(addresses) != self.num_ranks:
            raise ValueError(f"addresses: expected {self.num_ranks}, one for each rank, got {len(addresses)}")
        padded = [*addresses, *[0] * (MOST_RANKS - len(addresses))]
        fields = struct.pack("<8QQQQII", *padded, alarm, patience_ns, self.words_at, self.rows, 0)
        return fields.ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True)
class Inbox:
    """One rank's end of an exchange among the GPUs of a host.

    Attributes:
        rank: whose inbox this is.
        shape: of all inboxes of the exchange.
        address: of this rank's inbox on its device.
        alarm: [4] int32 in pinned host memory, which the device writes when a wait is given up.
        library: the exchange for calls that the inbox does not take.
    """

    rank: int
    shape: InboxShape
    address: int
    alarm: Tensor
    library: Exchange

    def gather(self, shard: Tensor) -> Sequence[Tensor]:
        return self.library.gather(shard)

    def check(self) -> None:
        """Raises RankLostError where a wait was given up. Reads host memory only: it may be called at any time."""
        missing, noticed, call, _ = self.alarm.tolist()
        if not missing:
            return
        ranks = [str(rank) for rank in range(self.shape.num_ranks) if missing >> rank & 1]
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        seen = (
            f"collective {call}, as rank {self.rank} saw"
            if noticed
            else f"a collective, as a peer of rank {self.rank} saw"
        )
        raise RankLostError(f"{who} did not take part in time in {seen}")
