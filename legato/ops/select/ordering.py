"""A total order of float32 numbers that depends on their values alone, and the k first in it.

Owns how ties, signed zeros, NaN and subnormals rank. Plain functions, not ops. Called by `select` and `sample`.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Below every key: what no number ranks as. One more than the least int32, to leave room for the position beneath it.
BELOW_ALL = 1 - 2**31
_NAN_KEY = BELOW_ALL + 1
_LOW_WORD = 0xFFFFFFFF


def ordered_keys(values: Tensor) -> Tensor:
    """float32 -> int32 in the same order: -0.0 equals +0.0, every NaN ranks below -inf, no subnormal is flushed.

    The magnitude bits of a float32 order like integers; the sign is put back as a sign.
    """
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    return torch.where(bits < 0, -magnitude, magnitude).masked_fill_(magnitude > 0x7F800000, _NAN_KEY)


def first_k(keys: Tensor, k: int) -> Tensor:
    """Positions [T, k] int64 of the k largest keys [T, L] int32, largest first, equal keys in ascending position.

    Key and position form one integer, so that no two are equal and no library is asked to break a tie.
    """
    positions = torch.arange(keys.shape[1], dtype=torch.int64, device=keys.device)
    ranked = torch.sub(keys.to(torch.int64) << 32, positions)
    return ranked.topk(k, dim=1).values.neg_().bitwise_and_(_LOW_WORD)
