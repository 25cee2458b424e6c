# pyright: basic
"""How a weight is cut for `sm90_linear.cu`: per shape, recorded from measurements.

Owns the table and the arithmetic of shared memory. Must not know tensors. Called by `sm90.py`; why the entries are what
they are is in NOTES.md. A shape that is not recorded has no tiling: cuBLAS multiplies it.
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
#: Rows that one launch takes at most, in tiles of 8. The source could take more; that has not been measured.
MOST_ROWS = 16
#: Shared memory of a multiprocessor, what the system keeps of it for each block, and a block's barriers.
SHARED_BYTES, _RESERVED, _STATIC = 227 * 1024, 1024, 1024


@dataclass(frozen=True)
class Recorded:
    """An entry of the table. `strips`, `ranks` as in `Tiling`; `ring`: KiB of weights in flight per thread block;
    `x_copies`: x by copies into shared memory, else straight into registers; `paced`: only one slot per warp is asked
    for at first; `most_rows`: up to which it was checked on the GPU (more go to cuBLAS)."""

    strips: int
    ranks: int
    ring: int
    x_copies: bool = False
    paced: bool = False
    most_rows: int = MOST_ROWS


@dataclass(frozen=True)
class Tiling:
    """A thread block computes `strips` * 16 outputs; the `ranks` blocks of a cluster share K, and in each the warps do.

    Each warp has `slots` slots of `chunk` blocks of K in its ring of weights, of which `paced` are asked for before the
    kernel's dependency is resolved; the others follow as those arrive. It fetches x for `batch` slots together: by
    copies into shared memory (`x_copies`), `x_slots` batches ahead, or straight into registers. `bits` of a weight: 16
    (bfloat16) or 8 (e4m3). `most_rows` that it takes: 8 or 16.
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

    @property
    def block_k(self) -> int:
        """K of one block."""
        return 512 // self.bits

    def macros(self, tiles: int) -> dict[str, int]:
        """The source's macros for one or two tiles of 8 rows."""
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
        }
        room = SHARED_BYTES // (_shared_bytes(made) + _RESERVED + _STATIC)
        return {**made, "RESIDENT": 2 if room >= 2 and _fits_128_registers(made) else 1}

    def shared_bytes(self, tiles: int) -> int:
        """Dynamic shared memory of a thread block."""
        return _shared_bytes(self.macros(tiles))


def _shared_bytes(macros: dict[str, int]) -> int:
    outputs, tokens = macros["STRIPS"] * STRIP, 8 * macros["TILES"]
    ring = macros["SLOTS"] * macros["CHUNK"] * macros["STRIPS"] * BLOCK_BYTES
    partial = tokens * (outputs + 4) * 4
    x_row = macros["BATCH"] * macros["CHUNK"] * (128 if macros["FP8"] else 64)
    x_pitch = x_row + 16 if macros["FP8"] else x_row if x_row % 128 else x_row + 64
    x_ring = macros["X_SLOTS"] * tokens * x_pitch if macros["X_COPIES"] else 0
    inbox = tokens * outputs * 4 if macros["RANKS"] > 1 else 0
    return macros["WARPS"] * (max(ring, partial) + x_ring) + inbox


def _fits_128_registers(macros: dict[str, int]) -> bool:
    """An estimate: sums, fragments of x in registers, and some for everything else."""
    chains = 2 if macros["STRIPS"] <= 2 and not macros["FP8"] else 1
    sums = 4 * macros["STRIPS"] * macros["TILES"] * chains
    batches = 0 if macros["X_COPIES"] else macros["X_SLOTS"]
    x = 4 * macros["BATCH"] * macros["CHUNK"] * macros["TILES"] * batches * (2 if macros["FP8"] else 1)
    return sums + x <= (96 if not macros["FP8"] else 72)


def cut(k_blocks: int, recorded: Recorded, bits: int) -> Tiling:
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
    chunk = min(chunk, most)
    slots = -(-longest // chunk) if whole else max(1, held // chunk)
    batch = max(1, min(-(-longest // chunk), most // chunk))
    ahead = 3 if x_copies else 2
    x_slots = 1 if batch * chunk >= longest else ahead
    in_flight = 1 if paced else slots
    return Tiling(strips, recorded.ranks, chunk, slots, batch, x_copies, x_slots, in_flight, bits, recorded.most_rows)


#: (outputs, inputs, bits) -> how the weight is cut.
RECORDED: dict[tuple[int, int, int], Recorded] = {
    (128, 6144, 16): Recorded(2, 8, 64),
    (256, 6144, 16): Recorded(2, 8, 64),
    (512, 6144, 16): Recorded(4, 8, 98),
    (2048, 2048, 16): Recorded(2, 1, 128, paced=True),
    (2624, 6144, 16): Recorded(3, 2, 144, paced=True),
    (2784, 6144, 16): Recorded(3, 2, 144, paced=True),
    (3072, 6144, 16): Recorded(3, 2, 144, paced=True),
    (4096, 2048, 16): Recorded(2, 1, 128, paced=True),
    (4096, 6144, 16): Recorded(2, 1, 128, x_copies=True, paced=True),
    (6144, 256, 16): Recorded(3, 1, 48),
    (6144, 1536, 16): Recorded(3, 1, 144, paced=True),
    (6144, 2048, 16): Recorded(3, 1, 144, paced=True),
    (6144, 12288, 16): Recorded(3, 1, 144, x_copies=True, most_rows=8),
    (6144, 16384, 16): Recorded(3, 1, 144, x_copies=True, most_rows=8),
    (16384, 2048, 16): Recorded(8, 1, 192, paced=True),
    (19360, 6144, 16): Recorded(5, 1, 96, most_rows=8),
    (2624, 6144, 8): Recorded(3, 2, 96, x_copies=True, paced=True),
    (4096, 6144, 8): Recorded(2, 1, 96, x_copies=True, paced=True),
    (6144, 16384, 8): Recorded(3, 1, 96, x_copies=True),
    (16384, 2048, 8): Recorded(8, 1, 160),
    # What `legato bench skeleton` streams in place of the absorbed products, the experts and launches without weights.
    (256, 256, 16): Recorded(1, 1, 144, paced=True, most_rows=8),
    (2048, 512, 16): Recorded(1, 1, 144, paced=True, most_rows=8),
    (4096, 192, 16): Recorded(2, 1, 144, paced=True, most_rows=8),
    (9584, 2048, 16): Recorded(5, 1, 144, paced=True, most_rows=8),
    (12288, 2048, 16): Recorded(6, 1, 144, paced=True, most_rows=8),
    (19184, 2048, 16): Recorded(6, 1, 144, paced=True, most_rows=8),
    (34096, 2048, 16): Recorded(6, 1, 144, paced=True, most_rows=8),
    (68208, 2048, 16): Recorded(6, 1, 144, paced=True, most_rows=8),
}


@cache
def tiling(outputs: int, inputs: int, bits: int) -> Tiling | None:
    """The recorded tiling of a weight [outputs, inputs] of 16 or 8 bits, or None."""
    recorded = RECORDED.get((outputs, inputs, bits))
    return None if recorded is None else cut(inputs * bits // 512, recorded, bits)
