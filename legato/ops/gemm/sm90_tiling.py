# pyright: basic
"""How a weight is cut for `sm90_linear.cu`: per shape, recorded from measurements, or by the rule that they suggest.

Owns the table, the rule and the arithmetic of shared memory. Must not know tensors. Called by `sm90.py`; why the entries
are what they are is in NOTES.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

#: Outputs of one strip: the wide side of mma.m16n8k16.
STRIP = 16
#: Bytes of one block: 16 outputs by 64 bytes of K.
BLOCK_BYTES = 1024
#: Warps of a thread block; each has a slice of K.
WARPS = 8
#: Tiles of 8 rows for which there are kernels; all sums of a strip and tile live in registers.
TILES = (1, 2, 4, 8)
#: Registers of a thread for sums and x, by bits of a weight: the others hold addresses, flags and fragments of weights.
_SUM_REGISTERS = {16: 200, 8: 150}
#: Shared memory of a multiprocessor, what the system keeps of it for each block, and a block's barriers.
SHARED_BYTES, _RESERVED, _STATIC = 227 * 1024, 1024, 1024
#: What is left of it as L1, since all kernels ask for the most shared memory.
L1_BYTES = 28 * 1024
#: Tiles of rows for which that is heeded, by bits of a weight: two tiles with e4m3 are faster in registers all the same, and
#: eight of bfloat16, where the library is faster, were not tried otherwise.
_ASYNCHRONOUS = {16: (2, 4), 8: (4, 8)}
#: Bytes of a row of x over one block of K, by whether weights are e4m3.
_ROW_BYTES = (64, 128)


@dataclass(frozen=True)
class Recorded:
    """An entry of the table. `strips`, `ranks` as in `Tiling`; `ring`: KiB of weights in flight per thread block;
    `x_copies`: x by copies into shared memory, else straight into registers; `paced`: only one slot per warp is asked
    for at first; `chunk`: blocks of K in a slot, where that differs from the rule; `rows`: up to which it is faster than
    the library, likewise; `held`, `residents`: as in `Tiling`; `wide`: the same strips and ranks for more than one tile of rows,
    where that is faster cut otherwise."""

    strips: int
    ranks: int
    ring: int
    x_copies: bool = False
    paced: bool = False
    chunk: int | None = None
    rows: int | None = None
    held: int = 0
    residents: int = 1
    wide: Recorded | None = None


#: Rows up to which the kernel is faster than the library, by bits of a weight, unless recorded otherwise: for FP8 the library
#: needs the weight widened.
_FASTER_ROWS = {16: 32, 8: 64}


@dataclass(frozen=True)
class Tiling:
    """A thread block computes `strips` * 16 outputs; the `ranks` blocks of a cluster share K, and in each the warps do.

    Each warp has `slots` slots of `chunk` blocks of K in its ring of weights, of which `paced` are asked for before the
    kernel's dependency is resolved; the others follow as those arrive. It fetches x for `batch` slots together: by
    copies into shared memory (`x_copies`), `x_slots` batches ahead, or straight into registers. `bits` of a weight: 16
    (bfloat16) or 8 (e4m3). All that is for one or two tiles of rows; more tiles read the same packed weight in smaller
    pieces, and x always into registers. Beyond `most_rows` the library is faster. `k_blocks`: blocks of K that the weight
    has, and `whole`: whether its strips divide into groups, for which the kernel is compiled. `held`: blocks of K whose
    weights a warp has read into registers when one or two tiles of rows come. `residents`: thread blocks that a
    multiprocessor must hold, at least. `wide`: for more than one tile of rows, if that differs.
    """

    strips: int
    ranks: int
    chunk: int
    slots: int
    batch: int
    x_copies: bool
    x_slots: int
    paced: int
    bits: int
    most_rows: int
    k_blocks: int
    whole: bool
    held: int
    residents: int
    wide: Tiling | None

    @property
    def block_k(self) -> int:
        """K of one block."""
        return 512 // self.bits

    @property
    def most_tiles(self) -> int:
        """The most tiles of 8 rows that one launch takes."""
        return max(tiles for tiles in TILES if tiles <= 2 or self._takes(tiles))

    def macros(self, tiles: int) -> dict[str, int]:
        """The source's macros for so many tiles of 8 rows."""
        if self.wide is not None and tiles > 1:
            return self.wide.macros(tiles)
        made = self._in_registers(tiles)
        asynchronous = tiles in _ASYNCHRONOUS[self.bits] and not made["X_COPIES"]
        return self._with_held(_with_residents(made | _past_the_l1(made) if asynchronous else made))

    def normed_macros(self, tiles: int) -> dict[str, int]:
        """The same for rows that are normed on the way in, each warp its whole slice of K at once."""
        if self.wide is not None and tiles > 1:
            return self.wide.normed_macros(tiles)
        made = {**self._in_registers(tiles), "NORM": 1}
        asynchronous = _past_the_l1(made) if tiles in _ASYNCHRONOUS[self.bits] else {}
        whole = asynchronous.get("X_SLOTS") == 1
        return self._with_held(_with_residents(made | asynchronous if whole else made))

    def _with_held(self, macros: dict[str, int]) -> dict[str, int]:
        """Held are no more blocks than every slice has and the first batch of x, nor any where copies bring x in turns."""
        in_turns = (macros["X_COPIES"] or macros["X_ASYNC"]) and macros["X_SLOTS"] > 1
        wanted = 0 if in_turns or macros["TILES"] > 2 else self.held
        if macros.get("NORM") and macros["FP8"]:  # which needs the registers itself
            wanted = min(wanted, 1)
        of_x, shortest = macros["BATCH"] * macros["CHUNK"], self.k_blocks // (self.ranks * WARPS)
        residents = max(macros["RESIDENT"], self.residents)
        return {**macros, "HELD": min(wanted, of_x, shortest), "RESIDENT": residents}

    def _in_registers(self, tiles: int) -> dict[str, int]:
        made = {
            "STRIPS": self.strips,
            "WARPS": WARPS,
            "RANKS": self.ranks,
            "TILES": tiles,
            "CHUNK": self.chunk,
            "SLOTS": self.slots,
            "BATCH": self.batch,
            "X_SLOTS": min(self.x_slots, 2) if self.x_copies and tiles == 2 else self.x_slots,
            "X_COPIES": int(self.x_copies),
            "PACED": self.paced,
            "FP8": int(self.bits == 8),
            "SWIGLU": 0,
            "K_BLOCKS": self.k_blocks,
            "WHOLE": int(self.whole),
            "X_ASYNC": 0,
        }
        return made if tiles <= 2 else made | self._of_many(tiles)

    def _of_many(self, tiles: int) -> dict[str, int]:
        """What differs for more than two tiles: a ring of as many bytes in smaller slots, x in registers."""
        blocks = 2 if tiles == 4 and self.bits == 16 else 1
        chunk = min(self.chunk, blocks)
        slots = self.slots * self.chunk // chunk
        return {
            "CHUNK": chunk,
            "SLOTS": slots,
            "BATCH": blocks // chunk,
            "X_SLOTS": 2,
            "X_COPIES": 0,
            "PACED": min(slots, -(-self.paced * self.chunk // chunk)),
        }

    def _takes(self, tiles: int) -> bool:
        made = self.macros(tiles)
        return (
            self.shared_bytes(tiles) + _RESERVED + 2 * _STATIC <= SHARED_BYTES
            and _registers(made) <= _SUM_REGISTERS[self.bits]
        )

    def shared_bytes(self, tiles: int) -> int:
        """Dynamic shared memory of a thread block."""
        return shared_bytes(self.macros(tiles))


def _past_the_l1(macros: dict[str, int]) -> dict[str, int]:
    """What differs where the rows of x that are on their way at once exceed the L1, through which loads come: asynchronous
    copies into shared memory, in as large pieces as there is room for, beside a ring of one or two slots less if need be. Nothing
    where they do not, or nothing fits."""
    rows, k_blocks = WARPS * 8 * macros["TILES"], macros["BATCH"] * macros["CHUNK"] * macros["X_SLOTS"]
    if rows * k_blocks * _ROW_BYTES[macros["FP8"]] > L1_BYTES:
        batches = (macros["BATCH"], macros["X_SLOTS"]), (1, 3), (1, 2)
        for slots in range(macros["SLOTS"], max(0, macros["SLOTS"] - 3), -1):
            for batch, x_slots in batches:
                made = {"X_ASYNC": 1, "BATCH": batch, "X_SLOTS": x_slots, "SLOTS": slots}
                made["PACED"] = min(slots, macros["PACED"])
                if _with_reserve(macros | made) <= SHARED_BYTES:
                    return made
    return {}


def _with_residents(macros: dict[str, int]) -> dict[str, int]:
    two = _fits_128_registers(macros) and 2 * _with_reserve(macros) <= SHARED_BYTES
    return {**macros, "RESIDENT": 2 if two else 1}


def _with_reserve(macros: dict[str, int]) -> int:
    normed = macros["BATCH"] * macros["CHUNK"] * _ROW_BYTES[macros["FP8"]] * WARPS if macros.get("NORM") else 0
    return shared_bytes(macros) + normed + _RESERVED + _STATIC


def shared_bytes(macros: dict[str, int]) -> int:
    """Dynamic shared memory of a thread block of a kernel with such macros."""
    outputs, tokens = macros["STRIPS"] * STRIP, 8 * macros["TILES"]
    ring = macros["SLOTS"] * macros["CHUNK"] * macros["STRIPS"] * BLOCK_BYTES
    partial = tokens * (outputs + 4) * 4
    x_row = macros["BATCH"] * macros["CHUNK"] * _ROW_BYTES[macros["FP8"]]
    x_pitch = x_row + 16 if macros["FP8"] else x_row if x_row % 128 else x_row + 64
    x_ring = macros["X_SLOTS"] * tokens * x_pitch if macros["X_COPIES"] or macros["X_ASYNC"] else 0
    inbox = tokens * outputs * 4 if macros["RANKS"] > 1 else 0
    return macros["WARPS"] * (max(ring, partial) + x_ring) + inbox


def _registers(macros: dict[str, int]) -> int:
    """An estimate of what a thread keeps: sums, products of one strip, fragments of x in registers."""
    chains = 2 if macros["STRIPS"] <= 2 and not macros["FP8"] else 1
    sums = 4 * macros["STRIPS"] * macros["TILES"] * chains
    products = 8 * macros["TILES"] if macros["FP8"] and macros["TILES"] > 2 else 0
    batches = 0 if macros["X_COPIES"] else 1 if macros["X_ASYNC"] else macros["X_SLOTS"]
    x = 4 * macros["BATCH"] * macros["CHUNK"] * macros["TILES"] * batches * (2 if macros["FP8"] else 1)
    return sums + products + x


def _fits_128_registers(macros: dict[str, int]) -> bool:
    return _registers(macros) <= (64 if macros["FP8"] else 96 if macros["TILES"] <= 2 else 80)


def cut(strips_of_all: int, k_blocks: int, recorded: Recorded, bits: int) -> Tiling:
    """The tiling of a weight with `k_blocks` blocks of K: slots of about 4 KiB, as many as the ring holds."""
    strips, x_copies, paced = recorded.strips, recorded.x_copies, recorded.paced
    longest = -(-k_blocks // (recorded.ranks * WARPS))
    held = max(1, min(longest, recorded.ring // (WARPS * strips)))
    whole = held == longest and not paced
    if whole:
        chunk = min(longest, 4)
    else:
        chunk = next(c for c in (4, 2, 1) if c <= max(1, held // 2) and (c == 1 or held % c == 0 or held > 4))
    in_registers = 8 if strips == 1 or (longest <= 8 and strips <= 6) else 4
    most = (4 if x_copies else in_registers) * bits // 16
    chunk = min(recorded.chunk or chunk, most)
    slots = -(-longest // chunk) if whole else max(1, held // chunk)
    batch = max(1, min(-(-longest // chunk), most // chunk))
    ahead = 3 if x_copies else 2
    x_slots = 1 if batch * chunk >= longest else ahead
    in_flight = 1 if paced else slots
    rows = recorded.rows or _FASTER_ROWS[bits]
    whole_groups = strips_of_all % strips == 0
    wide = recorded.wide and cut(strips_of_all, k_blocks, recorded.wide, bits)
    shape = (bits, rows, k_blocks, whole_groups, recorded.held, recorded.residents, wide)
    return Tiling(strips, recorded.ranks, chunk, slots, batch, x_copies, x_slots, in_flight, *shape)


#: Three strips of e4m3, for more than eight rows: the whole slice of K in the ring.
_FP8_WIDE = Recorded(3, 2, 144, paced=True, chunk=2, held=4)
#: Six strips of e4m3 where K is long.
_FP8_OF_SIX = Recorded(6, 2, 96, x_copies=True, paced=True)

#: (outputs, inputs, bits) -> how the weight is cut.
RECORDED: dict[tuple[int, int, int], Recorded] = {
    (128, 6144, 16): Recorded(2, 8, 64, rows=64),
    (256, 6144, 16): Recorded(2, 8, 64, rows=64),
    (512, 6144, 16): Recorded(4, 8, 98, rows=40),
    (2048, 2048, 16): Recorded(2, 1, 128, paced=True, held=4),
    (2624, 6144, 16): Recorded(3, 2, 192, paced=True, chunk=2),
    (2784, 6144, 16): Recorded(3, 2, 192, paced=True, chunk=2),
    (3072, 6144, 16): Recorded(3, 2, 144, paced=True),
    (4096, 2048, 16): Recorded(2, 1, 128, paced=True, held=4),
    (4096, 6144, 16): Recorded(2, 1, 192, paced=True),
    (6144, 256, 16): Recorded(3, 1, 48),
    (6144, 1536, 16): Recorded(3, 1, 144, paced=True),
    (6144, 2048, 16): Recorded(3, 1, 192, paced=True, chunk=2),
    (6144, 8192, 16): Recorded(3, 1, 144, x_copies=True),
    (6144, 12288, 16): Recorded(3, 1, 144, x_copies=True, paced=True),
    (6144, 16384, 16): Recorded(3, 1, 144, x_copies=True, paced=True),
    (16384, 2048, 16): Recorded(8, 1, 192, paced=True),
    (19360, 6144, 16): Recorded(10, 1, 160, paced=True),
    (24576, 6144, 16): Recorded(6, 1, 192, paced=True, wide=Recorded(6, 1, 144, paced=True)),
    (2624, 6144, 8): Recorded(3, 2, 96, paced=True, chunk=1, held=2, wide=_FP8_WIDE),
    (2784, 6144, 8): Recorded(3, 2, 96, paced=True, chunk=2, held=2, residents=2, wide=_FP8_WIDE),
    (3072, 6144, 8): Recorded(3, 2, 96, paced=True, chunk=2, held=2, residents=2, wide=_FP8_WIDE),
    (4096, 6144, 8): Recorded(4, 2, 96, x_copies=True, paced=True),
    (6144, 8192, 8): _FP8_OF_SIX,
    (6144, 12288, 8): Recorded(6, 2, 144, x_copies=True, paced=True, wide=_FP8_OF_SIX),
    (6144, 16384, 8): _FP8_OF_SIX,
    (16384, 2048, 8): Recorded(4, 1, 64, paced=True),
    (2048, 2048, 8): Recorded(2, 1, 64, paced=True, held=2, wide=Recorded(2, 1, 64, paced=True, held=4)),
    (4096, 2048, 8): Recorded(2, 1, 64, paced=True),
    (6144, 2048, 8): Recorded(3, 1, 64, paced=True, rows=48, held=2),
    (512, 6144, 8): Recorded(2, 4, 64),
    (6144, 256, 8): Recorded(2, 1, 48),
    (6144, 1536, 8): Recorded(3, 1, 64, paced=True, held=1, wide=Recorded(3, 1, 64, paced=True)),
    (19360, 6144, 8): Recorded(5, 1, 144, x_copies=True, paced=True, wide=Recorded(5, 1, 96, x_copies=True)),
    (24576, 6144, 8): Recorded(4, 1, 96),
    # What `legato bench skeleton` streams in place of the absorbed products, the experts and launches without weights.
    (256, 256, 16): Recorded(1, 1, 144, paced=True),
    (2048, 512, 16): Recorded(1, 1, 144, paced=True),
    (4096, 192, 16): Recorded(2, 1, 144, paced=True),
    (20736, 2048, 16): Recorded(6, 1, 144, paced=True),
    (31072, 2048, 16): Recorded(6, 1, 144, paced=True),
    (104608, 2048, 16): Recorded(6, 1, 144, paced=True),
}


#: Strips from which on a weight is cut into more thread blocks than run at once, two of them per multiprocessor.
_MANY_STRIPS = 6 * 132
#: Thread blocks that a weight is cut into otherwise, and those below which a cluster shares K.
_BLOCKS, _FEW_BLOCKS = 128, 72
#: K of one rank above which x is copied to shared memory, or K shared by more ranks.
_LONG = 3072


def _by_rule(strips: int, inputs: int, bits: int) -> Recorded:
    """What the recorded tilings suggest for any weight: about 128 thread blocks, K shared by a cluster where there are too
    few outputs for that or K is long. A rank owns whole groups of eight outputs."""
    if strips >= _MANY_STRIPS:
        return Recorded(5 if bits == 16 else 4, 1, 96, x_copies=inputs > 2 * _LONG)
    ranks = 1
    while (
        ranks < 8
        and inputs * bits // 512 >= 4 * WARPS * ranks
        and (strips * ranks <= _FEW_BLOCKS or inputs > _LONG * ranks)
    ):
        ranks *= 2
    held = max(1, min(6, round(strips * ranks / _BLOCKS)))
    whole = max(1, ranks // 2)
    held = -(-held // whole) * whole
    return Recorded(held, ranks, 96 if bits == 8 else 144, x_copies=bits == 8 and inputs > _LONG * ranks, paced=True)


@cache
def tiling(outputs: int, inputs: int, bits: int) -> Tiling | None:
    """The tiling of a weight [outputs, inputs] of 16 or 8 bits: the recorded one, or one by the rule. None where 16 does
    not divide the outputs or 64 bytes the rows."""
    if outputs % STRIP or inputs * bits % 512 or not outputs or not inputs:
        return None
    recorded = RECORDED.get((outputs, inputs, bits))
    strips = outputs // STRIP
    return cut(strips, inputs * bits // 512, recorded or _by_rule(strips, inputs, bits), bits)
