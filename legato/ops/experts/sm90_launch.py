# pyright: basic
"""How `sm90_moe.cu` is cut for a shape, its buffers, and its launch.

Owns the macros and the arithmetic of shared memory. Must not know packing. Called by `sm90.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.experts.sm90_packing import STEP_BYTES, STEP_K

_SOURCE = Path(__file__).with_name("sm90_moe.cu")
FORMATS = {"bf16": 0, "fp8": 1, "int4": 2, "nvfp4": 3}
#: Rows that one launch takes: beyond, sorted rows are faster; and where tables for more have no room. More than ROWS_AT_ONCE are
#: fetched tile by tile.
MOST_ROWS = 128
FEWER_ROWS = 64
ROWS_AT_ONCE = 8
#: Of more pairs than these (rows * choices), tables have short entries.
_LEAN_PAIRS = 512
#: Of more rows, where K divides: warps that share a unit ("quads"), and rows of a tile (eight leave no room for copies of
#: three steps).
_SHARERS, _QUADS_ROWS = 4, 6
#: Of more than FEWER_ROWS rows: rows of a tile, and buffers for sums, as many as leave room for the largest copies.
_MANY_ROWS, _MANY_BUFFERS = {"bf16": 8, "fp8": 8, "int4": 8, "nvfp4": 7}, 2
#: Warps of a block. K is split over them, so their number decides the bits of a sum.
WARPS = 16
#: Shared memory that a block may have.
_SHARED_BYTES = 227 * 1024
#: Of a warp's sums of a unit, two columns of them.
_PARTIAL_BYTES = 128
#: Buffers in which the warps' sums of a unit meet, at most: how far warps may part.
_MOST_BUFFERS = 4
#: Slots of a ring, at most: what is asked for at once. Four-bit formats are slower with more (NOTES.md).
_MOST_SLOTS = {"bf16": 12, "fp8": 12, "int4": 2, "nvfp4": 2}


@dataclass(frozen=True)
class Experts:
    """What a launch is compiled for: formats of the routed experts and the shared one (None: there is none), sizes, and
    how many multiprocessors there are."""

    routed: str
    shared: str | None
    hidden: int
    width: int
    num_experts: int
    blocks: int


@dataclass(frozen=True)
class Cut:
    """The macros for a number of rows, and the dynamic shared memory."""

    macros: tuple[tuple[str, int], ...]
    shared_bytes: int


def serves(hidden: int, width: int) -> bool:
    """Whether the kernel takes experts of this D and F."""
    return hidden % 128 == 0 and hidden >= 128 and (width % 256 == 0 or width == 128)


def _in_quads(what: Experts, rows: int) -> bool:
    """Whether four warps share a unit: of rows that do not stay in shared memory, where K divides evenly among all warps,
    so that four of them give the same bits."""
    return rows > ROWS_AT_ONCE and what.hidden // 128 % WARPS == 0


def _sharers_and_held(what: Experts, rows: int) -> tuple[int, int]:
    """Warps that share a unit, and rows of x in shared memory: few sizes, so that few kernels are compiled."""
    if _in_quads(what, rows):
        return _SHARERS, _QUADS_ROWS if rows <= FEWER_ROWS else _MANY_ROWS[what.routed]
    return WARPS, next(held for held in (1, 2, 4, 6, ROWS_AT_ONCE) if held >= min(rows, ROWS_AT_ONCE))


def _most_tiles(rows: int, held: int, choices: int, experts: int) -> int:
    """Tiles of as many rows as are held: an expert has one more than whole ones at most."""
    pairs = rows * choices
    return min(pairs, experts + pairs // held) + -(-rows // held)


def _slice_k(what: Experts) -> int:
    """Of K of a warp in the first half, at most, in 128."""
    return -(-what.hidden // 128 // WARPS)


def _x_bytes(what: Experts, held: int, sharers: int) -> int:
    return held * (WARPS * _slice_k(what) * 256 + sharers * 16)


@cache
def most_rows(what: Experts, choices: int) -> int:
    """Rows that one launch takes: which pairs name an expert is marked where the rows of a tile lie later."""
    sharers, held = _sharers_and_held(what, MOST_ROWS)
    bits = what.num_experts * -(-MOST_ROWS * choices // 32) * 4
    return MOST_ROWS if bits <= _x_bytes(what, held, sharers) else FEWER_ROWS


@cache
def cut(what: Experts, rows: int, choices: int) -> Cut:
    """The kernel for up to `rows` rows (a class of rows: see `row_class`)."""
    quads, warps = _in_quads(what, rows), WARPS
    sharers, held = _sharers_and_held(what, rows)
    strips, slice_k = -(-what.hidden // 16 // what.blocks), _slice_k(what)
    pairs, tiles = rows * choices, _most_tiles(rows, held, choices, what.num_experts)
    lean = pairs > _LEAN_PAIRS
    x_bytes, terms = _x_bytes(what, held, sharers), (pairs + rows) * (strips * 16 + 4) * 4
    buffer = warps * -(-held // 2) * _PARTIAL_BYTES
    tables = tiles * (3 + 2 * held) + pairs * 2 if lean else tiles * (8 + 4 * held) + pairs * 8
    static = tables + _static_bytes(what)
    # The largest copies of which two are in flight, then as many buffers as leave room for them.
    room = _SHARED_BYTES - static - x_bytes
    chunks = [made for made in _chunks(what, slice_k, rows) if not quads or _divides(what, slice_k, made[0])]
    most_buffers = _MANY_BUFFERS if quads and rows > FEWER_ROWS else _MOST_BUFFERS
    for (chunk, shared_chunk), buffers in product(chunks, range(most_buffers, 1, -1)):
        slot = chunk * STEP_BYTES[what.routed]
        if what.shared is not None:
            slot = max(slot, shared_chunk * STEP_BYTES[what.shared])
        slots = min(_MOST_SLOTS[what.routed], (room - buffers * buffer) // (warps * slot))
        if slots >= 2:
            break
    span = 1 if rows <= 2 or what.routed == "bf16" else strips
    macros = {
        "FORMAT": FORMATS[what.routed],
        "SHARED": -1 if what.shared is None else FORMATS[what.shared],
        "HIDDEN": what.hidden,
        "WIDTH": what.width,
        "GRID": what.blocks,
        "WARPS": warps,
        "SLOTS": slots,
        "CHUNK": chunk,
        "SHARED_CHUNK": shared_chunk,
        "DYNAMIC_BYTES": x_bytes + buffers * buffer + warps * slots * slot,
        "BUFFERS": buffers,
        "SPAN": min(span, strips),
        "EXPERTS": what.num_experts,
        "CHOICES": choices,
        "X_ROWS": held,
        "MOST_PAIRS": pairs,
        "MOST_TILES": tiles,
        "MOST_FEATURES": _feature_rows(rows, choices),
        "SHARERS": sharers,
        "TERMS_SHARED": int(terms <= x_bytes),
    }
    return Cut(tuple(macros.items()), macros["DYNAMIC_BYTES"])


def _feature_rows(rows: int, choices: int) -> int:
    """Rows of a buffer of features: launches of few rows and of many take turns with buffers of their own."""
    return (FEWER_ROWS if rows <= FEWER_ROWS else MOST_ROWS) * (choices + 1)


def _static_bytes(what: Experts) -> int:
    """Of the shared memory that the source declares, what does not depend on rows, at most: factors, barriers and items that
    warps have asked for, by slots, and 512 bytes for the rest."""
    slots = _MOST_SLOTS[what.routed]
    factors = what.num_experts * 12 if what.routed == "nvfp4" else 0
    return factors + WARPS * (slots * 8 + (16 if slots < 4 else 64)) + 512


def _chunks(what: Experts, slice_k: int, rows: int) -> list[tuple[int, int]]:
    """Steps of one copy of the routed experts and of the shared one, best first."""
    if what.routed == "bf16":
        return [(1 if rows <= 2 and what.shared is not None else 2, 2), (1, 1)]
    if what.routed == "fp8":
        return [(1, 1)]
    whole = next(steps for steps in (3, 2, 1) if slice_k % steps == 0)
    wide = [] if what.shared == "fp8" else [(whole, 2)]  # two steps of bfloat16 are one of FP8
    return [*wide, (whole, 1), (min(whole, 2), 1), (1, 1)]


def _divides(what: Experts, slice_k: int, chunk: int) -> bool:
    """Whether copies of so many steps of the routed experts end with a warp's slice of K."""
    return slice_k * 128 // STEP_K[what.routed] % chunk == 0


def row_class(rows: int) -> int:
    """The number of rows that a launch of `rows` rows is compiled for."""
    return next(most for most in (1, 2, 4, 6, 8, 16, 32, FEWER_ROWS, MOST_ROWS) if most >= rows)


@cache
def kernel(what: Experts, most_rows: int, choices: int) -> tuple[Kernel, int]:
    """The kernel for a class of rows, and its dynamic shared memory."""
    made = cut(what, most_rows, choices)
    return Kernel(Source(_SOURCE, dict(made.macros)), "moe", shared_bytes=made.shared_bytes), made.shared_bytes


@cache
def features(device: torch.device, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Two buffers of so many rows of features in which nothing is there yet, and the state of the launches that take turns with
    them."""
    both = torch.full((2, rows, width), -1, dtype=torch.int16, device=device)
    return both, torch.zeros(3, dtype=torch.int64, device=device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Blocks of a launch: all must be resident at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Packed:
    """Packed weights of the routed experts, their global factors [E, 3] (gate, up, down; NVFP4 only), and of the shared
    expert; its block scales only where it is not in the kernel's order; its gate_up and down as they are stored, where they are
    kept."""

    w13: Tensor
    w2: Tensor
    factors: Tensor | None = None
    shared13: Tensor | None = None
    shared2: Tensor | None = None
    shared13_scale_inv: Tensor | None = None
    shared2_scale_inv: Tensor | None = None
    stored: tuple[Tensor, Tensor] | None = None


def launch(what: Experts, packed: Packed, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """One launch: x [T, D] bfloat16, 1 to MOST_ROWS rows; ids [T, A] int32 and weights [T, A] float32, contiguous."""
    rows, choices = ids.shape
    compiled, shared_bytes = kernel(what, row_class(rows), choices)
    y = torch.empty(rows, what.hidden, dtype=torch.bfloat16, device=x.device)
    both_features, state = features(x.device, _feature_rows(rows, choices), what.width)
    terms = None
    if not dict(cut(what, row_class(rows), choices).macros)["TERMS_SHARED"]:
        pitch = -(-what.hidden // 16 // what.blocks) * 16 + 4
        terms = torch.empty(what.blocks, rows * (choices + 1), pitch, dtype=torch.float32, device=x.device)
    how = Launch(grid=(what.blocks,), block=(32 * WARPS,), shared_bytes=shared_bytes, programmatic=True)
    compiled(
        how, packed.w13, packed.w2, packed.factors, packed.shared13, packed.shared2, x, ids, weights, y, both_features,
        terms, state, rows, x.stride(0),
    )  # fmt: skip
    return y
