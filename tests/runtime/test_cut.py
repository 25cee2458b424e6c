"""Where an iteration's tokens end: at a stop id, at the length limit, or at the capacity of the pages, which ends nothing."""

from __future__ import annotations

import pytest
import torch

from legato.ops import cut

SAMPLED = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("accepted", "stop", "limit", "room", "count", "ends"),
    [
        (3, -1, 9, 9, 3, False),
        (4, 7, 9, 9, 3, True),
        (2, 7, 9, 9, 2, False),
        (4, -1, 3, 9, 3, True),
        (4, 5, 3, 9, 1, True),
        (4, -1, 9, 2, 2, False),
        (4, -1, 9, 0, 0, False),
        (4, -1, 9, -5, 0, False),
        (4, 7, 9, 2, 2, False),
        (4, 7, 9, 3, 3, True),
        (4, -1, 2, 2, 2, True),
        (4, -1, 3, 2, 2, False),
        (4, -1, 0, 9, 0, True),
    ],
)
def test_whichever_comes_first(accepted: int, stop: int, limit: int, room: int, count: int, ends: bool) -> None:
    counts, ended = cut(
        torch.tensor([SAMPLED]),
        torch.tensor([accepted]),
        torch.tensor([[stop, -1]]),
        torch.tensor([limit]),
        torch.tensor([room]),
    )
    assert (counts.tolist(), ended.tolist()) == ([count], [ends])
