"""Checks of scale values, shared by the formats: a damaged scale is refused at load and never becomes a NaN in an
answer.

Owns the rules. Called by the format modules' `fault`.
"""

from __future__ import annotations

import torch


def float_fault(scale: torch.Tensor) -> str | None:
    """Why a float scale tensor cannot be used: NaN, infinite or negative entries. Zero entries are judged by
    `zero_fault`."""
    if bool(torch.isnan(scale).any()):
        return f"NaN at {_first(torch.isnan(scale))}"
    if bool(torch.isinf(scale).any()):
        return f"infinity at {_first(torch.isinf(scale))}"
    if bool((scale < 0).any()):
        return f"{float(scale[scale < 0].flatten()[0])} at {_first(scale < 0)}"
    return None


def zero_fault(scale: torch.Tensor, amax: torch.Tensor) -> str | None:
    """Zero scales are harmless only over groups that hold nothing but zeros; `amax` [like scale] is each group's
    largest code."""
    bad = (scale == 0) & (amax > 0)
    return f"0 at {_first(bad)} over non-zero weights" if bool(bad.any()) else None


def _first(mask: torch.Tensor) -> str:
    return str(mask.nonzero()[0].tolist()) if mask.dim() else "the scalar"
