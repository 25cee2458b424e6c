"""The best token of each row where ranks share the vocabulary: each rank's best as a key, and the best of all keys.

A part of the folder's vocabulary; `__init__` lists its cases. Keys are eight bytes a row, where gathered logits would be all of
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.case import EXACT, Case, Where
from legato.ops.op import op

_ID = 0xFFFFFFFF
_NAN, _LEAST = 0x7FFFFFFF, -(1 << 63)


@op
def greedy_keys(logits: Tensor, first: int) -> Tensor:
    """Of each row the best of a rank's part of the vocabulary, as a number that is the greater the better it is.

    logits [T, W] float32 or bfloat16 of the tokens from `first` on, possibly none (W = 0) -> keys [T] int64: the value in the
    order of floats above, the complement of the token's id below, so that of equal values the lowest id is best.
    """
    if not logits.shape[1]:
        return torch.full((logits.shape[0],), _LEAST, device=logits.device)
    tokens = logits.argmax(-1, keepdim=True)
    value = logits.gather(1, tokens)[:, 0].to(torch.float32) + 0.0  # the two zeros are equal
    bits = value.view(torch.int32).to(torch.int64)
    # Floats in order as signed numbers: of negative ones all bits but the sign are flipped.
    ordered = torch.where(value.isnan(), _NAN, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (ordered << 32) | (_ID - (tokens[:, 0] + first))


@op
def best_of_keys(keys: Tensor) -> Tensor:
    """The best token of each row. keys [N, T] int64 of N ranks -> tokens [T] int64."""
    return token_of(keys.amax(0))


def token_of(keys: Tensor) -> Tensor:
    """The tokens of keys."""
    return _ID - (keys & _ID)


def _keys_case(rows: int, width: int, on: Where = "any") -> Case:
    """Whole numbers, so that the best are many; a rank's columns are a part of wider rows."""
    return Case(
        greedy_keys,
        f"greedy_keys rows={rows} width={width}",
        lambda draw: (draw.normal(rows, width + 3).round()[:, :width], 2 * width),
        EXACT,
        bytes=rows * width * 4,
        on=on,
    )


RANKS_CASES = (
    *(_keys_case(rows, width) for rows, width in ((1, 1024), (6, 1001), (2, 0))),
    *(_keys_case(rows, 19360, "gpu") for rows in (1, 6, 96)),
    *(
        Case(
            best_of_keys,
            f"best_of_keys ranks={ranks} rows={rows}",
            lambda draw, ranks=ranks, rows=rows: (
                draw.integers(ranks, rows, low=-(1 << 62), high=1 << 62, dtype=torch.int64),
            ),
            EXACT,
            bytes=ranks * rows * 8,
        )
        for ranks, rows in ((1, 6), (8, 1), (8, 96))
    ),
)
