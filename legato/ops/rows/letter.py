"""What an iteration tells the host, in one place of device memory that one copy fetches.

Owns the layout of a letter. A part of the folder's vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.case import EXACT, Case, Draw
from legato.ops.op import op

LETTER_EXTRA = 6
"""Numbers of a request's line besides its R tokens and K drafts."""


@op
def write_letter(
    letters: Tensor,
    number: Tensor,
    sampled: Tensor,
    drafts: Tensor,
    counts: Tensor,
    accepted: Tensor,
    offered: Tensor,
    ended: Tensor,
    live: Tensor,
) -> None:
    """Writes the next letter of a ring, in place.

    letters [n, B, R + K + LETTER_EXTRA] int64 and number [1] int64 are written: the number goes up by one, and letter number % n
    becomes, request by request, sampled [B, R] int64, the next drafts [B, K] int64 (K may be 0), counts [B], accepted [B],
    offered [B], ended [B] bool, live [B] bool, the number.
    """
    number.add_(1)
    columns = (counts, accepted, offered, ended.to(torch.int64), live.to(torch.int64), number.expand_as(counts))
    letter = torch.cat((sampled, drafts, torch.stack(columns, 1)), 1)
    letters.index_copy_(0, number.remainder(letters.shape[0]), letter.unsqueeze(0))


def _case(requests: int, width: int, drafts: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        return (
            draw.integers(8, requests, width + drafts + LETTER_EXTRA, low=0, high=9, dtype=torch.int64),
            draw.integers(1, low=0, high=1 << 40, dtype=torch.int64),
            draw.integers(requests, width, low=0, high=8192, dtype=torch.int64),
            draw.integers(requests, drafts, low=0, high=8192, dtype=torch.int64),
            draw.integers(requests, low=0, high=7, dtype=torch.int64),
            draw.integers(requests, low=0, high=7, dtype=torch.int64),
            draw.integers(requests, low=0, high=7, dtype=torch.int64),
            draw.uniform(requests) < 0.5,
            draw.uniform(requests) < 0.5,
        )

    name = f"write_letter requests={requests} width={width} drafts={drafts}"
    return Case(write_letter, name, make, EXACT, mutates=(0, 1), bytes=requests * (width + drafts + LETTER_EXTRA) * 16)


LETTER_CASES = tuple(_case(*shape) for shape in ((1, 6, 5), (16, 6, 5), (16, 1, 7), (3, 1, 0)))
