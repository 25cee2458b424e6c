"""How much each earlier token matters to a row, by the indexer.

Owns the index score. Knows the index cache's layouts through `cache`, and nothing of selection. Called by `legato.model` on full layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.cache import gather_index_pages
from legato.ops.cache.layout import PAGE, e4m3_to_float
from legato.ops.op import op

#: Pages dequantised at a time: 256 pages of 64 keys of 128 numbers are 8 MiB.
_PAGE_TILE = 256


@op
def index_scores(
    q: Tensor, gates: Tensor, cache: Tensor, page_table: Tensor, request: Tensor, lengths: Tensor
) -> Tensor:
    """score[t, j] = sum over heads h of gates[t, h] * relu(q[t, h] . k[j]) for the keys j < lengths[t] of the row's request.

    q [T, I, X] e4m3 or float32, gates [T, I] float32 (every scale folded in), cache: any index layout, page_table [B, P] int32,
    request [T] int32 (a row of page_table), lengths [T] int32 (keys visible to the row, itself included, <= 64 P)
    -> float32 [T, 64 P], -inf where j >= lengths[t]. A key's own scale multiplies it before the dot product, exactly (a power of two).
    Source: DeepSeek-V3.2-Exp, "lightning indexer".
    """
    queries = e4m3_to_float(q) if q.dtype == torch.float8_e4m3fn else q.to(torch.float32)
    gates = gates.to(torch.float32).unsqueeze(1)
    scores = torch.full((q.shape[0], page_table.shape[1] * PAGE), -torch.inf, device=q.device)
    visible: list[int] = lengths.tolist()
    rows_of: dict[int, list[int]] = {}
    for row, owner in enumerate(request.tolist()):
        rows_of.setdefault(owner, []).append(row)
    for owner, rows in rows_of.items():
        longest = -(-max(visible[row] for row in rows) // PAGE)
        for first in range(0, longest, _PAGE_TILE):
            keys = gather_index_pages.reference(cache, page_table[owner, first : min(first + _PAGE_TILE, longest)])
            for row in rows:
                _score_pages(scores[row], queries[row], gates[row], keys, first * PAGE, visible[row])
    return scores


def _score_pages(out: Tensor, query: Tensor, gate: Tensor, keys: Tensor, start: int, length: int) -> None:
    """Scores of one row for the pages `keys` [n, 64, X] that begin at position `start`. Each page is one product of fixed shape."""
    count = min(-(-(length - start) // PAGE), keys.shape[0])
    if count <= 0:
        return
    heads = torch.bmm(query.expand(count, *query.shape), keys[:count].transpose(1, 2)).relu_()
    stop = min(length, start + count * PAGE)
    out[start:stop] = torch.bmm(gate.expand(count, *gate.shape), heads).view(-1)[: stop - start]
