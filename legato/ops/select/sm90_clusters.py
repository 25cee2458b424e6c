# pyright: basic
"""Selection as the fastest public kernel does it (SGLang's TopK-V2, in its cluster form), written anew: a baseline.

Owns the launches of `sm90_float16.cu`. It never serves: its bins are of scores rounded to float16, a bin with more scores than
its buffer holds is cut, and equal scores are taken as they arrive. docs/decisions says why ours differs. Imported by name only:
`legato bench ops select -i sm90_clusters`, and by `sm90_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.select import top_k

_MOST = 2048


@dataclass(frozen=True)
class Binned:
    """A form of `sm90_float16.cu`: thread blocks that share a row, bits of a float16 that make a bin, scores that the buffer of
    the boundary bin holds, and up to how many of them are ranked by counting."""

    cluster: int
    key_bits: int
    ties: int
    few: int

    @cached_property
    def kernel(self) -> Kernel:
        macros = {"CLUSTER": self.cluster, "KEY_BITS": self.key_bits, "TIES": self.ties, "FEW": self.few}
        return Kernel(Source(Path(__file__).with_name("sm90_float16.cu"), macros), "float16_topk")

    def run(
        self, scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor, plan: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`top_k` for contiguous float32 rows, in no order; exact for rows whose boundary bin is not cut and without ties.

        Raises ValueError for k > 2048 and rows that do not start at a multiple of 16 bytes.
        """
        rows, stride = scores.shape[0], scores.stride(0)
        if not 0 < k <= _MOST or scores.stride(1) != 1 or stride % 4 or scores.data_ptr() % 16:
            raise ValueError(f"float16_topk: k = {k} (at most {_MOST}), rows {stride} scores apart (a multiple of 4)")
        slots = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
        counts = torch.empty(rows, dtype=torch.int32, device=scores.device)
        how = Launch(grid=(rows * self.cluster,), block=(1024,), cluster=(self.cluster,), programmatic=True)
        self.kernel(how, scores, lengths, page_table, request, slots, counts, stride, page_table.stride(0), k)
        return slots, counts


CLUSTERS = Binned(cluster=8, key_bits=10, ties=2048, few=128)
top_k.on("sm90_clusters")(CLUSTERS.run)
