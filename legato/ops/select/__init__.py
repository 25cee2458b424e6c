"""Which earlier tokens a row will attend to: the k best scores, as slots of the cache.

Owns the exact selection rule and its ties. Called by `legato.model` on full layers; shared layers reuse its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.cache.layout import PAGE
from legato.ops.case import EXACT, Case, Draw, Where
from legato.ops.op import op
from legato.ops.select.adversarial import adversarial_rows
from legato.ops.select.ordering import BELOW_ALL, first_k, ordered_keys

PAGE_BITS = PAGE.bit_length() - 1


@op
def top_k(
    scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor, plan: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The min(k, lengths[t]) highest-scoring positions of each row, in ascending order, as physical slots.

    scores [T, L] float32, lengths [T] int32 (<= L; positions beyond are not looked at), k >= 1, page_table [B, P] int32
    with 64 P >= L, request [T] int32 (a row of page_table) -> (slots [T, k] int32 = page * 64 + offset, -1 beyond the
    count; counts [T] int32). Equal scores go to the lowest position; -0.0 equals +0.0; NaN ranks below -inf (and NaNs
    equal each other); subnormals count as what they are. A row no longer than k gets all its positions, whatever its
    scores. So the result is a function of the scores alone, to the bit. `plan`: what `top_k.plan(lengths, request, k)`
    returned for these very arguments, once for all layers of a forward: which thread blocks take which row, where rows may
    differ in length. It changes no bit; without it every row has as many. Source: arXiv:2512.02556 (top-k selector of
    DeepSeek sparse attention); the tie rule is ours.
    """
    counts = lengths.clamp_max(k).to(torch.int32)
    width = min(k, scores.shape[1])
    longest = _longest(scores, lengths)
    if longest <= k:
        positions = torch.arange(width, device=scores.device).expand(scores.shape[0], width)
    else:
        visible = scores[:, :longest]
        beyond = torch.arange(longest, device=scores.device) >= lengths.unsqueeze(1)
        # Positions beyond a row's length are last in the order and last in position: after the sort they follow the
        # row's own.
        positions = first_k(ordered_keys(visible).masked_fill_(beyond, BELOW_ALL), width).sort(1).values
    pages = page_table.index_select(0, request).to(torch.int64).gather(1, positions >> PAGE_BITS)
    slots = (pages << PAGE_BITS) | (positions & (PAGE - 1))
    slots = slots.masked_fill(torch.arange(width, device=scores.device) >= counts.unsqueeze(1), -1).to(torch.int32)
    return (slots if width == k else functional.pad(slots, (0, k - width), value=-1)), counts


def _longest(scores: Tensor, lengths: Tensor) -> int:
    """Positions that are looked at. Only where the host holds the lengths does it read them: elsewhere it would wait."""
    if lengths.device.type != "cpu":
        return scores.shape[1]
    return int(lengths.max()) if lengths.numel() else 0


def _as_sets(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Slots in ascending order: what is compared where baselines run that leave them in no order."""
    return outputs[0].sort(1).values, outputs[1]


def _as_they_are(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs


def _case(rows: int, k: int, longest: int, ties: int, on: Where = "any", wide: int = 0) -> Case:
    """Scores with about `ties` equal values each (the ReLU sum makes exact zeros common), rows of staggered lengths.
    `wide`: the width of scores and table, where it is more than the longest row, as in the engine's graphs."""
    pages = -(-max(longest, wide) // PAGE)

    def make(draw: Draw) -> tuple[Any, ...]:
        scores = draw.normal(rows, pages * PAGE)
        if ties > 1:
            scores = (scores * (longest / ties / 8)).round() / 16
        lengths = longest - torch.arange(rows, dtype=torch.int32, device=draw.device)
        table = draw.distinct(2 * pages, 2 * pages).view(2, pages)
        return scores, lengths.clamp_min(0), k, table, draw.integers(rows, low=0, high=2)

    name = f"top_k rows={rows} k={k} length={longest} ties={ties}" + (f" width={wide}" if wide else "")
    defined = _as_sets if on == "gpu" and ties == 1 else _as_they_are
    return Case(top_k, name, make, EXACT, bytes=rows * (longest * 4 + k * 8), on=on, defined=defined)


def _adversarial(width: int, k: int, on: Where = "any") -> Case:
    """One row of every kind that breaks selection kernels; the scores beyond a row's length are NaN."""

    def make(draw: Draw) -> tuple[Any, ...]:
        scores = torch.stack(tuple(adversarial_rows(draw, width).values()))
        rows, pages = scores.shape[0], -(-width // PAGE)
        lengths = width - torch.arange(rows, dtype=torch.int32, device=draw.device)
        scores = functional.pad(scores, (0, -width % PAGE), value=torch.nan)
        beyond = torch.arange(scores.shape[1], device=draw.device) >= lengths.unsqueeze(1)
        table = draw.distinct(3 * pages, 3 * pages).view(3, pages)
        return scores.masked_fill(beyond, torch.nan), lengths, k, table, draw.integers(rows, low=0, high=3)

    return Case(top_k, f"top_k adversarial k={k} width={width}", make, EXACT, bytes=20 * (width * 4 + k * 8), on=on)


def _mixed(lengths: tuple[int, ...], k: int, on: Where = "any") -> Case:
    """Rows of very different lengths in one launch."""

    def make(draw: Draw) -> tuple[Any, ...]:
        pages = -(-max(lengths) // PAGE)
        scores = draw.normal(len(lengths), pages * PAGE)
        table = draw.distinct(pages, pages).view(1, pages)
        request = torch.zeros(len(lengths), dtype=torch.int32, device=draw.device)
        return scores, draw.listed(*lengths), k, table, request

    name = f"top_k mixed k={k} lengths={min(lengths)}..{max(lengths)}"
    return Case(top_k, name, make, EXACT, bytes=sum(lengths) * 4 + len(lengths) * k * 8, on=on)


#: Rows, and the lengths at which selection is measured; those of the figure of latency over length.
_LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536, 81920, 131072, 262144, 524288, 1048576)
_MEASURED = {1: _LENGTHS, 6: _LENGTHS, 32: _LENGTHS, 128: _LENGTHS}
#: The longest context of the tables that a decode graph holds.
_WIDE = 1 << 20

CASES = (
    *(_case(rows, 256, longest, ties) for rows in (1, 6) for longest in (100, 256, 257, 1000) for ties in (1, 20)),
    _case(6, 64, 67, 4),
    _case(2, 2048, 4096, 1),
    _adversarial(700, 64),
    _mixed((0, 1, 63, 64, 65, 66, 255, 256, 257, 1000), 64),
    *(_case(6, 2048, longest, 3000, "gpu") for longest in (4096, 32768, 131072)),
    *(_case(rows, 2048, longest, 1, "gpu") for rows, lengths in _MEASURED.items() for longest in lengths),
    *(_case(rows, 2048, longest, 1, "gpu", _WIDE) for rows in (6, 12, 24, 48, 96) for longest in (2048, 8192)),
    *(_case(6, 2048, longest, 1, "gpu", _WIDE) for longest in (32768, 131072)),
    *(_adversarial(width, 2048, "gpu") for width in (2111, 4099, 20002, 81919, 300001)),
    _mixed((0, 1, 63, 64, 65, 2047, 2048, 2049, 2050, 8191, 81920, 1048576), 2048, "gpu"),
)
