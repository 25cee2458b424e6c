# pyright: basic
"""Products of 33 to 128 rows with a weight as it is stored: `sm90_many.cu`.

Owns which products it makes, how a weight is cut, and the launch. Must not know layers. Called by `sm90.py`. A row's bits
depend on nothing but that row, for as many rows as the kernel takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source, TensorMaps
from legato.ops.strides import dense, in_rows

_SOURCE = Path(__file__).with_name("sm90_many.cu")
#: Rows for which there are kernels.
WIDTHS = (48, 64, 96, 128)
#: Bytes of K in a slot of weights, the most slots of a ring, and those of e4m3 that are asked for at first.
_SLOT_K, _MOST_SLOTS, _FP8_PACED = 128, 8, 2
#: Shared memory of a multiprocessor; and what the system keeps of it for a thread block, with that one's barriers.
_SHARED_BYTES, _RESERVED = 228 * 1024, 2048
#: Thread blocks that run at once: of clusters of one or two, and of larger ones, which do not fill the multiprocessors.
_BLOCKS, _CLUSTERED_BLOCKS = 128, 110


@dataclass(frozen=True)
class Form:
    """How a weight is cut: `ranks` blocks of a cluster share K, and each has 64 * `halves` outputs. A multiprocessor has room for
    `resident` of them."""

    ranks: int
    halves: int
    resident: int = 1

    def macros(self, tokens: int, bits: int, steps: int) -> dict[str, int]:
        """The source's macros for so many rows, a multiple of 16, and a weight of `steps` slots of K."""
        fitting = (_SHARED_BYTES // self.resident - _RESERVED - self._inbox(tokens)) // self._slot(tokens, bits)
        slots = min(_MOST_SLOTS, fitting, -(-steps // self.ranks))
        made = {"TOKENS": tokens, "HALVES": self.halves, "RANKS": self.ranks, "SLOTS": slots, "FP8": int(bits == 8)}
        made["PACED"] = slots if bits == 16 else min(slots, _FP8_PACED)
        return {**made, "RESIDENT": self.resident}

    def shared_bytes(self, tokens: int, bits: int, steps: int) -> int:
        """Dynamic shared memory of a thread block."""
        return self.macros(tokens, bits, steps)["SLOTS"] * self._slot(tokens, bits) + self._inbox(tokens)

    def _slot(self, tokens: int, bits: int) -> int:
        return self.halves * 64 * _SLOT_K + tokens * _SLOT_K * 16 // bits

    def _inbox(self, tokens: int) -> int:
        return (self.ranks - 1) * -(-tokens // (8 * self.ranks)) * self.halves * 128 * 16


#: Where another form than the rule's is faster.
RECORDED: dict[tuple[int, int, int], Form] = {
    (2624, 6144, 16): Form(5, 1, 2),
    (2784, 6144, 16): Form(5, 1, 2),
    (4096, 2048, 8): Form(2, 1, 2),
    (4096, 6144, 8): Form(2, 1, 2),
}
#: (outputs, inputs) of bfloat16 -> the first and the last rows for which it is faster than the kernel of few and the library.
_ROWS: dict[tuple[int, int], tuple[int, int]] = {
    (128, 6144): (65, 128),
    (256, 6144): (65, 128),
    (2784, 6144): (33, 96),
    (6144, 256): (33, 128),
    (6144, 1536): (33, 96),
    (6144, 2048): (33, 96),
    (8192, 2048): (33, 96),
    (16384, 2048): (33, 128),
    (6144, 12288): (33, 48),
    (6144, 16384): (33, 48),
}


@cache
def form(outputs: int, inputs: int, bits: int) -> Form:
    """The form of a weight [outputs, inputs]: as many blocks as run at once. Of e4m3 two on a multiprocessor, which widen in
    turn; of bfloat16 one, whose ring is longer."""
    if (outputs, inputs, bits) in RECORDED:
        return RECORDED[outputs, inputs, bits]
    steps, found = inputs * bits // (8 * _SLOT_K), [(0, 0, Form(1, 2))]
    for halves in (1, 2) if bits == 16 else (1,):
        groups, resident = -(-outputs // (64 * halves)), 16 // bits
        for ranks in range(1, 9):
            most = _BLOCKS if ranks <= 2 else _CLUSTERED_BLOCKS
            if groups * ranks <= most * resident and (ranks == 1 or steps >= 2 * ranks):
                found.append((groups * ranks, -halves, Form(ranks, halves, resident)))
    return max(found, key=lambda one: one[:2])[2]


def rows_served(outputs: int, inputs: int, bits: int) -> tuple[int, int]:
    """The first and the last rows of a weight [outputs, inputs] for which the kernel is the fastest: of e4m3, which the library
    needs widened, all that it takes; of bfloat16 the fewer, the larger the weight."""
    if outputs % 16 or inputs * bits % (8 * _SLOT_K) or not inputs:
        return 1, 0
    if bits == 8 or (outputs, inputs) in _ROWS:
        return _ROWS[outputs, inputs] if bits == 16 else (33, WIDTHS[-1])
    if outputs > 8192 or outputs * inputs > 4096 * 6144:
        return 1, 0
    return 33, WIDTHS[-1] if outputs <= 4096 else 64 if inputs <= 2048 else 48


def serves(rows: int, outputs: int, inputs: int, bits: int) -> bool:
    """Whether the kernel is the fastest for so many rows of a weight [outputs, inputs]."""
    first, last = rows_served(outputs, inputs, bits)
    return first <= rows <= last


@cache
def kernel(cut: Form, tokens: int, bits: int, steps: int) -> tuple[Kernel, int]:
    """The kernel of a form for so many rows, and its dynamic shared memory."""
    shared = cut.shared_bytes(tokens, bits, steps)
    return Kernel(Source(_SOURCE, cut.macros(tokens, bits, steps)), "many", shared_bytes=shared), shared


_MAPS = TensorMaps()


def multiply(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    scale_inv: Tensor | None = None,
    cut: Form | None = None,
) -> Tensor:
    """x [T, K] bfloat16 (1 to 128 rows) with a stored weight [N, K], of bfloat16 or, with `scale_inv`, of e4m3: one launch.
    `cut`: another form than the weight's own."""
    (rows, inputs), outputs, bits = x.shape, weight.shape[0], 16 if scale_inv is None else 8
    steps, cut = inputs * bits // (8 * _SLOT_K), cut or form(outputs, inputs, bits)
    tokens = next(width for width in WIDTHS if width >= rows)
    compiled, shared = kernel(cut, tokens, bits, steps)
    y, x, weight = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device), in_rows(x), dense(weight)
    maps = _MAPS.of(weight, (64 * cut.halves, _SLOT_K * 8 // bits)), _MAPS.of(x, (tokens, 64))
    blocks = -(-outputs // (64 * cut.halves)) * cut.ranks
    cluster = (cut.ranks,) if cut.ranks > 1 else None
    how = Launch((blocks,), (128 * cut.halves + 64,), cluster, shared, programmatic=True)
    added, scales = (None if one is None else dense(one) for one in (residual, scale_inv))
    compiled(how, *maps, added, y, scales, rows, outputs, steps)
    return y
