"""Selection by `torch.topk`, as a baseline for benchmarks: what a few lines of PyTorch cost.

Owns nothing. It never serves: `torch.topk` promises nothing about ties, so on rows with equal scores at the threshold
its choice may differ from the reference, and from run to run. Imported where it is asked for by name.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.select import PAGE, PAGE_BITS, top_k


@top_k.on("torch_topk")
def top_k_torch(
    scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor, plan: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`top_k` for rows without NaN and -inf whose k-th score is unique; nothing is read back to the host."""
    width = min(k, scores.shape[1])
    counts = lengths.clamp_max(k).to(torch.int32)
    columns = torch.arange(scores.shape[1], device=scores.device)
    visible = scores.masked_fill(columns >= lengths.unsqueeze(1), -torch.inf)
    chosen = visible.topk(width, dim=1, sorted=False).indices
    # Positions beyond the row count as larger than all others, so that after the sort they come last.
    positions = chosen.masked_fill(chosen >= lengths.unsqueeze(1), scores.shape[1] - 1).sort(1).values
    short = lengths.unsqueeze(1) <= k
    positions = torch.where(short, columns[:width], positions)
    pages = page_table.index_select(0, request).to(torch.int64).gather(1, positions >> PAGE_BITS)
    slots = (pages << PAGE_BITS) | (positions & (PAGE - 1))
    slots = slots.masked_fill(columns[:width] >= counts.unsqueeze(1), -1).to(torch.int32)
    return (slots if width == k else functional.pad(slots, (0, k - width), value=-1)), counts
