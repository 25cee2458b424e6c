"""Penalties on tokens that have come before, as APIs define them, on rows of logits.

Owns the formula. A part of the folder's vocabulary; `__init__` lists its cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.case import Case, Draw, Tolerance
from legato.ops.op import op


@op(reference_ok=True)
def penalize(
    logits: Tensor, generated: Tensor, in_prompt: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Logits lowered for what has come before.

    logits [T, W]; generated [T, W] int32, how often each token was generated before this row; in_prompt [T, W] bool;
    repetition, frequency, presence [T] float32 (1, 0, 0 = off) -> [T, W] float32. First the repetition penalty on tokens
    of the prompt and generated ones (a positive logit is divided by it, another multiplied: Keskar et al. 2019, as
    `transformers` does it), then frequency * times generated + presence * (generated at all) is taken away (the formula
    of the OpenAI API reference). Elementwise: a row's bits do not depend on the other rows.
    """
    logits, was_generated = logits.to(torch.float32), generated > 0
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(was_generated | in_prompt, repeated, logits)
    return logits - (frequency.unsqueeze(1) * generated + presence.unsqueeze(1) * was_generated)


def _case(rows: int, vocab: int) -> Case:
    """Row by row: off, repetition, frequency, presence, all of them."""

    def make(draw: Draw) -> tuple[Any, ...]:
        kind = torch.arange(rows, device=draw.device) % 5
        generated = draw.integers(rows, vocab, low=0, high=4, dtype=torch.int32)
        in_prompt = draw.uniform(rows, vocab) < 0.3
        repetition = torch.where((kind == 1) | (kind == 4), draw.uniform(rows, low=0.5, high=1.8), 1.0)
        frequency = torch.where((kind == 2) | (kind == 4), draw.uniform(rows, low=-1.0, high=1.0), 0.0)
        presence = torch.where(kind >= 3, draw.uniform(rows, low=-1.0, high=1.0), 0.0)
        return draw.normal(rows, vocab, scale=3.0), generated, in_prompt, repetition, frequency, presence

    return Case(penalize, f"penalize rows={rows} vocab={vocab}", make, Tolerance(1e-6, 1e-6), bytes=rows * vocab * 13)


PENALTY_CASES = tuple(_case(rows, vocab) for rows, vocab in ((1, 8192), (7, 1000)))
