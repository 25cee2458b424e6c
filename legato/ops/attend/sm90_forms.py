"""How rows of attention are cut on Hopper: the compiled forms of the three kernels, the memory they take, the blocks of a row.

Owns what depends on shapes alone. Knows no tensor and launches nothing. Called by `sm90.py` and the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

from legato.ops.build import Source
from legato.ops.cache.layout import LATENT_BYTES, LATENT_ROPE, LATENT_WIDTH

#: Entries of a selection that a block takes at a time.
UNIT = 128
#: Of a block that stays.
STAYING_UNIT = 64
#: Most shared memory of a block, and the most that lets two of them share a multiprocessor.
MOST_BYTES, HALF_BYTES = 227 * 1024, 113 * 1024
#: Up to so many rows the bits of a row depend on no other row, whatever the selection's width.
INVARIANT_ROWS = 16
#: Parts that a row is added up from, at most; also the most blocks of a cluster.
PARTS = 16
#: The share of the multiprocessors that clusters of so many blocks find together.
_REACHED = {16: 0.75, 8: 0.875, 4: 1.0}
_FOLDER = Path(__file__).parent
_WIDTH = LATENT_WIDTH + LATENT_ROPE


class Way(IntEnum):
    """What a part is, of those that a row is added up from: a unit, where a block has one (ONE) or several (EACH), or
    all units of a block (RUNNING). The first two give the same bits, whatever the number of blocks. STAYING: a block takes whole
    rows, one after the other."""

    ONE = 0
    EACH = 1
    RUNNING = 2
    STAYING = 3


@dataclass(frozen=True)
class Form:
    """One compiled form. `heads`: 8 or 16 (`sparse_mla_few.cu`, or `sparse_mla_rows.cu` if STAYING), or 64
    (`sparse_mla_many.cu`, always RUNNING); `packed`: the cache is of the 656-byte layout; `early`: tokens are fetched before the
    preceding kernel has ended."""

    heads: int
    packed: bool
    way: Way = Way.RUNNING
    early: bool = False

    @property
    def few(self) -> bool:
        return self.heads <= 16

    @property
    def stays(self) -> bool:
        return self.way is Way.STAYING

    @property
    def threads(self) -> int:
        return 128 if self.stays else 256 if self.few else 384

    @property
    def bulk(self) -> bool:
        """Whether a token is one copy of the copy engine: FP8 tokens, which lie as they are stored, of a block that has several
        units one after the other."""
        return self.few and self.packed and self.way is Way.RUNNING and not self.early

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor must hold: where rows are many, one works while the other waits for its tokens. With 16
        heads they would spill."""
        return 2 if self.stays or (self.bulk and self.heads == 8) else 1

    @property
    def fixed_bytes(self) -> int:
        """Shared memory but for the inbox of `sparse_mla_few.cu`, as the sources lay it out; they check it."""
        queries = 2 * _WIDTH * self.heads
        if self.stays:
            return 2 * _WIDTH * STAYING_UNIT + 2 * queries + (2 * STAYING_UNIT + 2 * 4 * 4) * self.heads
        if not self.few:
            return 2 * _WIDTH * UNIT + queries + 5 * 4 * self.heads + 16 + 80 + PARTS * self.heads * 8
        tokens = UNIT * (LATENT_BYTES if self.packed else 2 * _WIDTH)
        numbers = 12 * PARTS + 2 * 4 * 8 + 4  # of a head: weights and shares by part, by warp, of the block
        widened = 2 * UNIT * self.heads + 4 * self.heads + 8 * UNIT if self.packed else 0
        barriers = 16 + (64 if self.bulk else 0)
        return tokens + queries + widened + numbers * self.heads + barriers

    def shared_bytes(self, units: int, blocks: int) -> int:
        """Of a block of a cluster of `blocks`, for selections of so many units."""
        if not self.few or blocks == 1:
            return self.fixed_bytes
        parts = blocks if self.way is Way.RUNNING else units
        return self.fixed_bytes + 4 * parts * (LATENT_WIDTH // blocks) * self.heads

    @property
    def source(self) -> Source:
        macros: dict[str, int | str] = {"FP8": int(self.packed), "FIXED_BYTES": self.fixed_bytes}
        if not self.few:
            return Source(_FOLDER / "sparse_mla_many.cu", macros)
        if self.stays:
            return Source(_FOLDER / "sparse_mla_rows.cu", {"HEADS": self.heads, "FIXED_BYTES": self.fixed_bytes})
        macros |= {"HEADS": self.heads, "MODE": int(self.way), "EARLY": int(self.early)}
        macros |= {"BULK": int(self.bulk), "RESIDENT": self.resident}
        return Source(_FOLDER / "sparse_mla_few.cu", macros)


FORMS = (
    *(
        Form(heads, packed, way, early)
        for heads in (8, 16)
        for packed in (False, True)
        for way in (Way.ONE, Way.EACH, Way.RUNNING)
        for early in (False, True)
    ),
    *(Form(heads, packed=False, way=Way.STAYING) for heads in (8, 16)),
    *(Form(64, packed) for packed in (False, True)),
)


@dataclass(frozen=True)
class Cut:
    """A launch: the form, the thread blocks that share a row and its heads (a power of two, or three), the shared memory of
    each, and blocks of all rows."""

    form: Form
    blocks: int
    shared_bytes: int
    across: int


@cache
def cut(rows: int, heads: int, packed: bool, width: int, processors: int) -> Cut:
    """The cut for `rows` rows of `heads` heads that select up to `width` tokens.

    Few heads and up to 16 units: as many blocks as there are units, fewer where the clusters would not run at once; the
    bits are the same. Otherwise one number of blocks for up to `INVARIANT_ROWS` rows, and beyond them the number that
    keeps a multiprocessor shortest; or blocks that stay, if there are more rows than multiprocessors.
    """
    most_heads = next((most for most in (8, 16) if heads <= most), 64)
    units = max(1, -(-width // UNIT))
    most = min(PARTS, 1 << (units - 1).bit_length())
    groups = rows * -(-heads // most_heads)
    chosen = _separate(most_heads, packed, units, most, groups, processors)
    if chosen is None and most_heads <= 16 and not packed and rows > max(processors, INVARIANT_ROWS):
        chosen = Form(most_heads, packed, Way.STAYING), 1
    if chosen is None:
        running = Form(most_heads, packed)
        blocks = most if rows <= INVARIANT_ROWS else _quickest(groups, units, most, processors, running)
        # Where each block has one unit, the parts are the same.
        way = Way.ONE if most_heads <= 16 and units <= blocks else Way.RUNNING
        chosen = Form(most_heads, packed, way), blocks
    form, blocks = chosen
    needed = form.shared_bytes(units, blocks)
    # Two blocks on one multiprocessor would leave others idle.
    alone = groups * blocks <= processors
    across = min(rows, form.resident * processors) if form.stays else rows * blocks
    return Cut(form, blocks, max(needed, HALF_BYTES + 1024) if alone else needed, across)


def _separate(heads: int, packed: bool, units: int, most: int, groups: int, processors: int) -> tuple[Form, int] | None:
    """The most blocks that run at once with a part for each unit; None where there is no such number."""
    if heads > 16 or units > PARTS:
        return None
    blocks = most
    while blocks > 1:
        form = Form(heads, packed, Way.ONE if units <= blocks else Way.EACH)
        at_once = int(processors * _REACHED.get(blocks, 1.0)) // blocks
        if groups <= at_once and form.shared_bytes(units, blocks) <= MOST_BYTES and (blocks >= 4 or units <= blocks):
            return form, blocks
        blocks //= 2
    return None


def _quickest(groups: int, units: int, most: int, processors: int, form: Form) -> int:
    """Blocks of a row that take the fewest units one after the other; what a block costs beside them is given in units. Two
    blocks on a multiprocessor take hardly longer than one."""
    beside = 2.5 if form.few else 3.0

    def cost(blocks: int) -> tuple[float, int]:
        resident = form.resident if units > blocks else 1
        at_once = processors * resident
        if resident > 1 and blocks > 2:  # clusters of four do not fill it
            at_once = at_once * 3 // 4
        return -(-groups * blocks // at_once) * (-(-units // blocks) + beside), blocks

    numbers = [1 << power for power in range(most.bit_length())]
    if not form.few and most >= 4:  # owners of unequal shares of the values
        numbers.append(3)
    return min(numbers, key=cost)
