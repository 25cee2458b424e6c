# pyright: basic
"""Selection as an older public kernel does it (SGLang's TopK-V1): one thread block for a row, bins of 8 bits. A baseline.

Owns the choice of that form of `sm90_float16.cu`. It never serves: a boundary bin of more than 4096 scores is cut, as those of
long rows are. Imported by name only: `legato bench ops select -i sm90_blocks`.
"""

from __future__ import annotations

from legato.ops.select import top_k
from legato.ops.select.sm90_clusters import Binned

BLOCKS = Binned(cluster=1, key_bits=8, ties=4096, few=0)
top_k.on("sm90_blocks")(BLOCKS.run)
