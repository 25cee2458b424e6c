"""What happens to an indexer query between its projection and scoring.

Owns the quantisation of the query and the folding of its scale into the head gates. Called by `legato.model` on full
layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.cache.layout import quantize_groups
from legato.ops.case import EXACT, Case
from legato.ops.op import op


@op
def quantize_index_query(q: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Round each head's query to e4m3 under a power-of-two scale (rounded up) and multiply that scale into the head's
    gate.

    q [T, I, X] float32 or bfloat16 (rotated), gates [T, I] float32 (already times I^-0.5 X^-0.5)
    -> (q e4m3 [T, I, X], gates float32 [T, I]). ReLU is homogeneous, so gate * relu(scale * q8 . k) = (gate * scale) *
    relu(q8 . k). Source: the indexer of DeepSeek-V3.2-Exp.
    """
    codes, scale = quantize_groups(q.to(torch.float32))
    return codes, gates * scale.squeeze(-1)


CASES = tuple(
    Case(
        quantize_index_query,
        f"quantize_index_query rows={rows} {str(dtype)[6:]}",
        lambda draw, rows=rows, dtype=dtype: (draw.normal(rows, 32, 128, dtype=dtype), draw.normal(rows, 32)),
        EXACT,
        bytes=rows * 32 * (128 * (dtype.itemsize + 1) + 8),
    )
    for rows, dtype in ((1, torch.float32), (6, torch.bfloat16), (9, torch.float32))
)
