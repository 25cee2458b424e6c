"""How likely a chosen token is under its row of logits: what tells a draft that will be accepted from one that will not.

A part of the folder's vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.case import Case, Draw, Tolerance, Where
from legato.ops.op import op


@op
def likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """softmax(logits)[token], at temperature 1 and without filters. logits [T, W], tokens [T] int64 -> [T] float32."""
    values = logits.to(torch.float32)
    chosen = values.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return (chosen - values.logsumexp(1)).exp()


def _case(rows: int, vocab: int, on: Where = "any") -> Case:
    """Of likely tokens, and of any."""

    def make(draw: Draw) -> tuple[Any, ...]:
        logits = draw.normal(rows, vocab, scale=3.0)
        anyone = draw.integers(rows, low=0, high=vocab, dtype=torch.int64)
        is_best = torch.arange(rows, device=logits.device) % 2 == 0
        return logits, torch.where(is_best, logits.argmax(1), anyone)

    name = f"likelihood rows={rows} vocab={vocab}"
    return Case(likelihood, name, make, Tolerance(1e-6, 2e-5), bytes=rows * vocab * 4, on=on)


LIKELIHOOD_CASES = (
    *(_case(rows, vocab) for rows, vocab in ((1, 8192), (6, 1001))),
    *(_case(rows, 154880, "gpu") for rows in (1, 16)),
)
