"""Which earlier tokens a row will attend to: the k best scores, as slots of the cache.

Owns the exact selection rule and its ties. Called by `legato.model` on full layers; shared layers reuse its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.cache.layout import PAGE
from legato.ops.op import op


@op
def top_k(scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor) -> tuple[Tensor, Tensor]:
    """The min(k, lengths[t]) highest-scoring positions of each row, in ascending order, as physical slots.

    scores [T, L] float32, lengths [T] int32 (<= L; positions beyond are not looked at), k >= 1, page_table [B, P] int32 with
    64 P >= L, request [T] int32 (a row of page_table) -> (slots [T, k] int32 = page * 64 + offset, -1 beyond the count; counts [T] int32).
    Equal scores go to the lowest position; -0.0 equals +0.0; NaN ranks below -inf (and NaNs equal each other); subnormals count as what
    they are. A row no longer than k gets all its positions, whatever its scores. So the result is a function of the scores alone, to the
    bit. Source: arXiv:2512.02556 (top-k selector of DeepSeek sparse attention); the tie rule is ours.
    """
    counts = lengths.to(torch.int64).clamp_max(k).unsqueeze(1)
    longest = int(lengths.max()) if lengths.numel() else 0
    columns = torch.arange(longest if longest > k else min(k, scores.shape[1]), device=scores.device)
    visible = columns < lengths.unsqueeze(1)
    if longest <= k:
        return _pad(_physical(columns.expand(scores.shape[0], -1), page_table, request, visible), k), counts.to(torch.int32).view(-1)
    chosen = visible & _among_best(scores[:, :longest], lengths, k)
    # Every chosen position is scattered to its rank, every other to a column that is cut off.
    rank = torch.where(chosen, chosen.cumsum(1, dtype=torch.int32) - 1, k).to(torch.int64)
    positions = torch.zeros(scores.shape[0], k + 1, dtype=torch.int64, device=scores.device)
    positions.scatter_(1, rank, columns.expand_as(rank))
    filled = torch.arange(k, device=scores.device) < counts
    return _physical(positions[:, :k], page_table, request, filled), counts.to(torch.int32).view(-1)


def _among_best(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """True at the k best positions of every row longer than k, and everywhere in the others."""
    keys = ordered_keys(scores)
    columns = torch.arange(scores.shape[1], device=scores.device)
    keys = keys.masked_fill_(columns >= lengths.unsqueeze(1), _BELOW_ALL)
    threshold = keys.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, ties = keys > threshold, keys == threshold
    wanted = k - above.sum(1, keepdim=True)
    return above | (ties & (ties.cumsum(1, dtype=torch.int32) <= wanted)) | (lengths <= k).unsqueeze(1)


_BELOW_ALL = -(2**31)
_NAN_KEY = _BELOW_ALL + 1


def ordered_keys(scores: Tensor) -> Tensor:
    """float32 -> int32 that order as the selection rule orders the scores: integers see no NaN, no -0.0 and no flushed subnormal."""
    bits = scores.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = torch.where(bits < 0, -magnitude, magnitude)
    return keys.masked_fill_(magnitude > 0x7F800000, _NAN_KEY)


def _physical(positions: Tensor, page_table: Tensor, request: Tensor, valid: Tensor) -> Tensor:
    flat_page = request.to(torch.int64).unsqueeze(1) * page_table.shape[1] + torch.where(valid, positions, 0) // PAGE
    slots = page_table.reshape(-1)[flat_page].to(torch.int64) * PAGE + positions % PAGE
    return torch.where(valid, slots, -1).to(torch.int32)


def _pad(slots: Tensor, width: int) -> Tensor:
    missing = width - slots.shape[1]
    return torch.nn.functional.pad(slots, (0, missing), value=-1) if missing else slots
