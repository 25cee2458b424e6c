# pyright: basic
"""Selection as the fastest public kernel does it (SGLang's TopK-V2, in its cluster form), written anew: a baseline.

Owns the launch of `sm90_clusters.cu`. It never serves: its bins are of scores rounded to float16, a bin with more than 2048
scores is cut, and equal scores are taken as they arrive. docs/decisions says why ours differs. Imported by name only:
`legato bench ops select -i sm90_clusters`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.select import top_k

_CLUSTER, _MOST = 8, 2048
KERNEL = Kernel(Source(Path(__file__).with_name("sm90_clusters.cu")), "cluster_topk")


@top_k.on("sm90_clusters")
def top_k_in_clusters(
    scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor
) -> tuple[Tensor, Tensor]:
    """`top_k` for contiguous float32 rows, in no order; exact for rows whose boundary bin is not cut and without ties.

    Raises ValueError for k > 2048 and rows that do not start at a multiple of 16 bytes.
    """
    rows, stride = scores.shape[0], scores.stride(0)
    if not 0 < k <= _MOST or scores.stride(1) != 1 or stride % 4 or scores.data_ptr() % 16:
        raise ValueError(f"sm90_clusters: k = {k} (at most {_MOST}), rows {stride} scores apart (a multiple of 4)")
    slots = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows, dtype=torch.int32, device=scores.device)
    how = Launch(grid=(rows * _CLUSTER,), block=(1024,), cluster=(_CLUSTER,), programmatic=True)
    KERNEL(how, scores, lengths, page_table, request, slots, counts, stride, page_table.stride(0), k)
    return slots, counts
