"""Attention and selection for training: dense causal, restricted to a selection, and the indexer's top-k as a mask.

Owns the Triton kernels of the selection (scores of all rows, exact threshold of the k-th largest). Every function has a
plain PyTorch path that the CPU takes. Knows nothing of the model's parameters; `model.py` and `evaluate.py` call it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU path needs no Triton
    triton = None


def attend_dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention, q and k [B, heads, S, D], v [B, heads, S, V]; v is padded to D for the flash kernels."""
    width = v.shape[-1]
    return F.scaled_dot_product_attention(q, k, F.pad(v, (0, q.shape[-1] - width)), is_causal=True,
                                          scale=scale)[..., :width]


@functools.cache
def _flex(length: int, device: str) -> tuple[Any, Any]:
    """The compiled flex attention and the causal block mask of one length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    block_mask = create_block_mask(causal, None, None, length, length, device=device)
    return torch.compile(flex_attention, dynamic=False), block_mask


def attend_selected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, how: str = "flex") -> Tensor:
    """Attention of each row over its selected keys; mask [B, S, S] bool or int8, one selection for all heads."""
    if how == "flex" and q.is_cuda:
        attention, block_mask = _flex(q.shape[2], str(q.device))

        def keep(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(mask[b, i, j] != 0, score, -float("inf"))

        return attention(q, k, v, score_mod=keep, block_mask=block_mask, scale=scale)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask == 0, -float("inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None], scale=scale)


def fake_quantise_e4m3(x: Tensor) -> Tensor:
    """x rounded to e4m3 with one power-of-two scale per row (last axis), as the index cache stores it."""
    scale = torch.clamp(x.abs().amax(-1, keepdim=True).float(), min=1e-4) / 448.0
    bits = (scale.contiguous().view(torch.int32) + 0x007FFFFF) & 0x7F800000
    scale = bits.view(torch.float32)
    return ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def select_mask_reference(q: Tensor, k: Tensor, w: Tensor, top_k: int) -> Tensor:
    """Selection mask [B, S, S]: the top_k best-scored causal keys of each row; q [B, S, H, D], k [B, S, D], w [B, S, H]."""
    length = k.shape[1]
    scores = (F.relu(torch.einsum("bqhd,bkd->bqhk", q.float(), k.float())) * w[..., None]).sum(2)
    causal = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
    scores = scores.masked_fill(~causal, -float("inf"))
    best = scores.topk(min(top_k, length), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & causal


if triton is not None:

    @triton.jit
    def _scores_kernel(q_ptr, k_ptr, w_ptr, out_ptr, length, HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
                       BN: tl.constexpr):
        """One tile [BM, BN] of index scores; tiles above the diagonal are left unwritten."""
        row_block, column_block, batch = tl.program_id(1), tl.program_id(0), tl.program_id(2).to(tl.int64)
        if column_block * BN > row_block * BM + BM - 1:
            return
        rows, columns, dims = row_block * BM + tl.arange(0, BM), column_block * BN + tl.arange(0, BN), tl.arange(0, D)
        keys = tl.load(k_ptr + (batch * length + columns[None, :]) * D + dims[:, None])
        total = tl.zeros((BM, BN), dtype=tl.float32)
        base = batch * length + rows
        for head in range(HEADS):
            query = tl.load(q_ptr + (base[:, None] * HEADS + head) * D + dims[None, :])
            gate = tl.load(w_ptr + base * HEADS + head)
            total += gate[:, None] * tl.maximum(tl.dot(query, keys), 0.0)
        tl.store(out_ptr + base[:, None] * length + columns[None, :], total)

    @triton.jit
    def _threshold_kernel(scores_ptr, mask_ptr, length, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
        """Mask of one row: keys whose score is at least the TOP_K-th largest causal one (found bit by bit)."""
        row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
        columns = tl.arange(0, WIDTH)
        visible = columns <= row
        base = (batch * length + row) * length
        scores = tl.load(scores_ptr + base + columns, mask=visible & (columns < length), other=0.0)
        bits = scores.to(tl.int32, bitcast=True)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
        threshold = tl.full((), 0, tl.uint32)
        for step in tl.static_range(32):
            trial = threshold | tl.full((), 1 << (31 - step), tl.uint32)
            enough = tl.sum((visible & (ordered >= trial)).to(tl.int32)) >= TOP_K
            threshold = tl.where(enough, trial, threshold)
        tl.store(mask_ptr + base + columns, (visible & (ordered >= threshold)).to(tl.int8), mask=columns < length)


def select_mask(q: Tensor, k: Tensor, w: Tensor, top_k: int) -> Tensor:
    """As select_mask_reference, by the kernels on a GPU; keys tied with the k-th are all kept there."""
    if triton is None or not (q.is_cuda or INTERPRET):
        return select_mask_reference(q, k, w, top_k)
    batch, length, heads, width = q.shape
    scores = torch.empty(batch, length, length, dtype=torch.float32, device=q.device)
    mask = torch.empty(batch, length, length, dtype=torch.int8, device=q.device)
    tile_m, tile_n = (128, 128) if length % 128 == 0 else (16, 16)
    grid = (length // tile_n, length // tile_m, batch)
    _scores_kernel[grid](q.contiguous(), k.contiguous(), w.contiguous(), scores, length, heads, width, tile_m, tile_n,
                         num_warps=8 if tile_m == 128 else 4)
    _threshold_kernel[(length, batch)](scores, mask, length, top_k, triton.next_power_of_2(length), num_warps=8)
    return mask
