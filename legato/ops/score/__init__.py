"""How much each earlier token matters to a row, by the indexer.

Owns the index score. Knows the index cache's layouts through `cache`, and nothing of selection. Called by
`legato.model` on full layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.cache import gather_index_pages, index_cache
from legato.ops.cache.layout import PAGE, e4m3_to_float
from legato.ops.case import Case, Draw, Tolerance, Where
from legato.ops.op import op
from legato.ops.prologue import quantize_index_query

#: Pages dequantised at a time: 256 pages of 64 keys of 128 numbers are 8 MiB.
_PAGE_TILE = 256
#: What the e4m3 tensor cores of Hopper cost: they keep about 14 bits of a partial sum. Scores of the cases are sums of 32
#: heads of about +-0.15 each.
FP8_PRODUCTS = Tolerance(1e-3, 4e-3)
#: Products of one row with one page held at a time: 2048 of 32 heads by 64 keys are 16 MiB.
_PRODUCT_TILE = 2048


@op
def index_scores(
    q: Tensor,
    gates: Tensor,
    cache: Tensor,
    page_table: Tensor,
    request: Tensor,
    lengths: Tensor,
    plan: Tensor | None = None,
) -> Tensor:
    """score[t, j] = sum over heads h of gates[t, h] * relu(q[t, h] . k[j]) for the keys j < lengths[t] of the row's
    request.

    q [T, I, X] e4m3 or float32, gates [T, I] float32 (every scale folded in), cache: any index layout, page_table [B,
    P] int32, request [T] int32 (a row of page_table), lengths [T] int32 (keys visible to the row, itself included, <=
    64 P) -> float32 [T, 64 P], whose values at j >= lengths[t] mean nothing and are for nobody to read (here -inf: a
    GPU does not fill a table as wide as the longest context allows). A key's own scale multiplies it exactly (a power
    of two). `plan`: what `index_scores.plan(page_table, request, lengths)` returned for these very tensors, once for
    all layers of a forward; without it the call makes its own. Source: DeepSeek-V3.2-Exp, "lightning indexer".
    """
    queries = e4m3_to_float(q) if q.dtype == torch.float8_e4m3fn else q.to(torch.float32)
    gates = gates.to(torch.float32)
    scores = torch.full((q.shape[0], page_table.shape[1] * PAGE), -torch.inf, device=q.device)
    if q.device.type != "cpu":
        _score_everything(scores, queries, gates, cache, page_table.index_select(0, request))
        return scores.masked_fill_(torch.arange(scores.shape[1], device=q.device) >= lengths.unsqueeze(1), -torch.inf)
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


def _score_everything(scores: Tensor, queries: Tensor, gates: Tensor, cache: Tensor, tables: Tensor) -> None:
    """Scores of every row against all pages of its own table, `tables` [T, P], seen or not: nothing is read on the host."""
    for row in range(queries.shape[0]):
        for first in range(0, tables.shape[1], _PAGE_TILE):
            keys = gather_index_pages.reference(cache, tables[row, first : first + _PAGE_TILE]).transpose(1, 2)
            products = torch.bmm(queries[row].expand(keys.shape[0], -1, -1), keys)
            spread = gates[row].expand(keys.shape[0], 1, -1)
            scores[row, first * PAGE : (first + keys.shape[0]) * PAGE] = torch.bmm(spread, products.relu_()).view(-1)


def _score_pages(queries: Tensor, gates: Tensor, keys: Tensor, rows: list[int]) -> Tensor:
    """Scores of some rows against the pages `keys` [n, X, 64] -> [rows, 64 n]. Each row and page is one product of
    fixed shape."""
    pages, heads = keys.shape[0], gates.shape[1]
    products = keys.new_empty(len(rows), pages, heads, PAGE)
    for place, row in enumerate(rows):
        torch.bmm(queries[row].expand(pages, *queries.shape[1:]), keys, out=products[place])
    spread = gates[rows].view(-1, 1, 1, heads).expand(-1, pages, 1, heads).reshape(-1, 1, heads)
    return torch.bmm(spread, products.relu_().view(-1, heads, PAGE)).view(len(rows), -1)


def _case(rows: int, dtype: torch.dtype, lengths: tuple[int, ...], on: Where = "any") -> Case:
    """`rows` consecutive rows of each request; a request's last row sees `lengths` keys."""
    pages = -(-max(lengths) // PAGE)

    def make(draw: Draw) -> tuple[Any, ...]:
        count = rows * len(lengths)
        q, gates = draw.normal(count, 32, 128), draw.normal(count, 32, scale=1 / 64)
        if dtype == torch.uint8:
            q, gates = quantize_index_query.reference(q, gates)
        table = draw.distinct(len(lengths) * pages, len(lengths) * pages).view(len(lengths), pages)
        request = torch.arange(len(lengths), device=draw.device).repeat_interleave(rows).to(torch.int32)
        ends = draw.listed(*lengths).repeat_interleave(rows)
        visible = ends - (rows - 1) + torch.arange(rows, device=draw.device).repeat(len(lengths))
        cache = index_cache(draw, dtype, len(lengths) * pages)
        return q, gates, cache, table, request, visible.clamp_min(0).to(torch.int32)

    return Case(
        index_scores,
        f"index_scores rows={rows} lengths={_shown(lengths)} {str(dtype)[6:]}",
        make,
        FP8_PRODUCTS if dtype == torch.uint8 else Tolerance(1e-5, 2e-5),
        bytes=sum(lengths) * (132 if dtype == torch.uint8 else 512) + rows * sum(lengths) * 4,
        flops=2 * rows * sum(lengths) * 32 * 128,
        on=on,
        defined=_visible_scores,
    )


def _shown(lengths: tuple[int, ...]) -> str:
    first, *others = lengths
    same = others and set(others) == {first}
    return f"{len(lengths)}x{first}" if same else ",".join(str(length) for length in lengths)


def _visible_scores(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    scores, lengths = outputs[0], arguments[5]
    beyond = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(1)
    return (scores.masked_fill(beyond, -torch.inf),)


#: Contexts at the borders of pages and of `index_topk`, and of production.
_CONTEXTS = (1, 63, 64, 65, 2047, 2048, 2049, 2050, 4095, 4097, 16384, 65536, 81920, 131072, 262144, 1 << 20)

CASES = (
    *(_case(rows, dtype, (200,)) for rows in (1, 6, 9) for dtype in (torch.float32, torch.uint8)),
    *(_case(6, dtype, (64, 65, 3, 191)) for dtype in (torch.float32, torch.uint8)),
    *(_case(6, torch.uint8, (length,), "gpu") for length in _CONTEXTS),
    *(_case(rows, torch.uint8, (16384,), "gpu") for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16)),
    *(_case(1, torch.uint8, (length,) * 6, "gpu") for length in (16384, 81920)),
    _case(6, torch.uint8, (4096,) * 16, "gpu"),
    _case(6, torch.uint8, (0, 1, 64, 3000, 81920, 129), "gpu"),
    _case(8, torch.uint8, (0, 100000, 5), "gpu"),
    _case(6, torch.uint8, (0, 1, 1 << 20), "gpu"),
)
