# pyright: basic
"""FlashMLA's sparse kernels of Hopper (the package `flash_mla`): a baseline for `sparse_mla`.

Owns how they are called. It never serves: heads are padded to 64 or 128, and on the 656-byte cache nothing says how many entries
of a selection count. Attached only where the package is installed. Imported by name only: `legato bench ops attend -i flash_mla`.
"""

from __future__ import annotations

from functools import cache as cached
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from legato.ops.attend import sparse_mla
from legato.ops.cache.layout import LATENT_WIDTH

PACKAGE: Any = import_module("flash_mla") if find_spec("flash_mla") is not None else None
_HEADS = (64, 128)


@cached
def _schedule(rows: int, heads: int, width: int, pages: int) -> Any:
    """How rows are split, made by the first call of a shape, as an engine makes it once for all layers."""
    return PACKAGE.get_mla_metadata()[0]


def attend_flash_mla(
    q: Tensor,
    cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    latent_dim: int,
    stored: Tensor | None = None,
) -> Tensor:
    """`sparse_mla` of 64 or 128 heads on a 656-byte cache (decoding) or a bfloat16 one (prefill, which knows no pages).

    Raises ValueError for other heads and types, and on the 656-byte cache for rows that select fewer than all entries.
    """
    rows, heads, width = q.shape[0], q.shape[1], slots.shape[1]
    if heads not in _HEADS or latent_dim != LATENT_WIDTH or q.dtype is not torch.bfloat16:
        raise ValueError(f"flash_mla takes bfloat16 queries of 64 or 128 heads, found {heads} of {q.dtype}")
    if cache.dtype is torch.bfloat16:
        tokens = cache.view(-1, 1, cache.shape[-1])
        return PACKAGE.flash_mla_sparse_fwd(
            q, tokens, slots.unsqueeze(1), scale, latent_dim, topk_length=counts, use_legacy=True
        )[0]
    if cache.dtype is not torch.uint8:
        raise ValueError(f"flash_mla takes caches of bfloat16 or of 656 bytes a token, found {cache.dtype}")
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()) and not bool((counts == width).all()):
        raise ValueError(f"flash_mla knows no counts on this cache; every row has to select {width} tokens")
    return PACKAGE.flash_mla_with_kvcache(
        q.unsqueeze(1), cache.unsqueeze(2), None, None, latent_dim, _schedule(rows, heads, width, cache.shape[0]),
        softmax_scale=scale, is_fp8_kvcache=True, indices=slots.unsqueeze(1), use_legacy=True,
    )[0].squeeze(1)  # fmt: skip


if PACKAGE is not None:
    sparse_mla.on("flash_mla")(attend_flash_mla)
