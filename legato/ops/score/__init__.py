"""How much each earlier token matters to a row, by the indexer.

Owns the index score. Knows the index cache's layouts through `cache`, and nothing of selection. Called by
`legato.model` on full layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops.cache import gather_index_pages
from legato.ops.cache.layout import PAGE, e4m3_to_float
from legato.ops.op import op

#: Pages dequantised at a time: 256 pages of 64 keys of 128 numbers are 8 MiB.
_PAGE_TILE = 256
#: Products of one row with one page held at a time: 2048 of 32 heads by 64 keys are 16 MiB.
_PRODUCT_TILE = 2048


@op
def index_scores(
    q: Tensor, gates: Tensor, cache: Tensor, page_table: Tensor, request: Tensor, lengths: Tensor
) -> Tensor:
    """score[t, j] = sum over heads h of gates[t, h] * relu(q[t, h] . k[j]) for the keys j < lengths[t] of the row's
    request.

    q [T, I, X] e4m3 or float32, gates [T, I] float32 (every scale folded in), cache: any index layout, page_table [B,
    P] int32, request [T] int32 (a row of page_table), lengths [T] int32 (keys visible to the row, itself included, <=
    64 P) -> float32 [T, 64 P], -inf where j >= lengths[t]. A key's own scale multiplies it before the dot product,
    exactly (a power of two). Source: DeepSeek-V3.2-Exp, "lightning indexer".
    """
    queries = e4m3_to_float(q) if q.dtype == torch.float8_e4m3fn else q.to(torch.float32)
    gates = gates.to(torch.float32)
    scores = torch.full((q.shape[0], page_table.shape[1] * PAGE), -torch.inf, device=q.device)
    visible: list[int] = lengths.tolist()
    rows_of: dict[int, list[int]] = {}
    for row, owner in enumerate(request.tolist()):
        rows_of.setdefault(owner, []).append(row)
    for owner, rows in rows_of.items():
        longest = -(-max(visible[row] for row in rows) // PAGE)
        for first in range(0, longest, _PAGE_TILE):
            last = min(first + _PAGE_TILE, longest)
            keys = gather_index_pages.reference(cache, page_table[owner, first:last]).transpose(1, 2)
            height = max(1, _PRODUCT_TILE // (last - first))
            for top in range(0, len(rows), height):
                tile = rows[top : top + height]
                scores[tile, first * PAGE : last * PAGE] = _score_pages(queries, gates, keys, tile)
    positions = torch.arange(scores.shape[1], device=q.device)
    return scores.masked_fill_(positions >= lengths.unsqueeze(1), -torch.inf)


def _score_pages(queries: Tensor, gates: Tensor, keys: Tensor, rows: list[int]) -> Tensor:
    """Scores of some rows against the pages `keys` [n, X, 64] -> [rows, 64 n]. Each row and page is one product of
    fixed shape."""
    pages, heads = keys.shape[0], gates.shape[1]
    products = keys.new_empty(len(rows), pages, heads, PAGE)
    for place, row in enumerate(rows):
        torch.bmm(queries[row].expand(pages, *queries.shape[1:]), keys, out=products[place])
    spread = gates[rows].view(-1, 1, 1, heads).expand(-1, pages, 1, heads).reshape(-1, 1, heads)
    return torch.bmm(spread, products.relu_().view(-1, heads, PAGE)).view(len(rows), -1)
