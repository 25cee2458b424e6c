# pyright: basic
"""What stands between attention's products and its selection, on Hopper: one launch of `sm90.cu`.

Owns the order of a packed w_uk, the choice between the kernel and the reference, and the launch. Imported by `bind` only.
A row's bits depend on nothing but that row.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.cache.layout import INDEX_WIDTH, check_index_cache, check_latent_cache
from legato.ops.gemm import sm90 as gemm
from legato.ops.gemm.sm90_heads import MOST_ROWS, arrange, group_rows
from legato.ops.gemm.sm90_packing import Kept, stored_of
from legato.ops.prologue import IndexNorm, LatentNorm, Places, prologue_bf16, prologue_full, prologue_shared
from legato.ops.strides import dense, in_rows, is_dense

#: As in `sm90.cu`: the rope part of a head, the warps of a block, the outputs of a warp.
ROPE, WARPS, SLICE = 64, 4, 16
#: A latent is a multiple of this: 16 bytes for each lane of a warp.
_LATENT_STEP = 256
_SOURCE = Path(__file__).with_name("sm90.cu")


@cache
def kernel(nope: int, latent: int, index_heads: int, cached: torch.dtype, whole: bool = False) -> Kernel:
    """The kernel for heads of `nope` + 64, a latent, so many index heads (0: no indexer) and a latent cache's type. `whole`: it
    absorbs nothing."""
    macros = {
        "NOPE": nope,
        "LATENT": latent,
        "INDEXED": int(index_heads > 0),
        "INDEX_HEADS": index_heads,
        "PACKED": int(cached == torch.uint8),
        "WHOLE": int(whole),
    }
    return Kernel(Source(_SOURCE, macros), "attention_inputs")


def pack(w_uk: Tensor) -> Tensor | Kept:
    """w_uk [H, N, C] in the order in which the kernel reads it, [H, C/8, N/32, 32, 8], beside itself; only itself where it
    serves no such shape or type."""
    _, nope, latent = w_uk.shape
    if w_uk.dtype != torch.bfloat16 or nope % 32 or latent % _LATENT_STEP:
        return w_uk
    return Kept(arrange(w_uk.transpose(1, 2)), w_uk)


def serves(qkv: Tensor, q: Tensor, norm: LatentNorm, places: Places, cache: Tensor) -> bool:
    """Whether the kernel takes these: rows and a norm of bfloat16, a rotation of 64 numbers, a bfloat16 or byte cache without
    gaps. The reference runs for all others."""
    return (
        all(x.dtype == torch.bfloat16 for x in (qkv, q, norm.weight))
        and 2 * places.cos.shape[1] == ROPE
        and places.cos.dtype == places.sin.dtype == torch.float32
        and cache.dtype in (torch.bfloat16, torch.uint8)
        and is_dense(cache)
    )


def is_whole(rank: int) -> bool:
    """Whether what stands behind a query latent of `rank` numbers begins with a 16-byte piece of its own."""
    return rank > 0 and rank % 8 == 0


def serves_indexer(norm: IndexNorm, keys: Tensor) -> bool:
    """Whether it takes the indexer's part: keys of 128 numbers as bytes without gaps, turned pairwise, a norm of bfloat16."""
    return (
        keys.dtype == torch.uint8
        and is_dense(keys)
        and norm.rotation == "interleaved"
        and norm.weight.shape[0] == INDEX_WIDTH
        and norm.weight.dtype == norm.bias.dtype == torch.bfloat16
    )


def run_shared(
    qkv: Tensor,
    q: Tensor,
    w_uk: Tensor | Kept,
    norm: LatentNorm,
    places: Places,
    cache: Tensor,
    whole: bool = False,
) -> Tensor:
    """The kernel for a packed w_uk where it `serves`, otherwise the reference."""
    stored = stored_of(w_uk)
    rank = qkv.shape[1] - stored.shape[2] - ROPE
    if not isinstance(w_uk, Kept) or not serves(qkv, q, norm, places, cache) or not is_whole(rank):
        return prologue_shared.reference(qkv, q, stored, norm, places, cache, whole)
    return _launch(qkv, q, w_uk, norm, places, cache, rank, 0, (), whole)


def run_full(
    qkv: Tensor,
    q: Tensor,
    w_uk: Tensor | Kept,
    norm: LatentNorm,
    index_norm: IndexNorm,
    places: Places,
    cache: Tensor,
    keys: Tensor,
    whole: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel for a packed w_uk where it `serves`, the indexer's part too; otherwise the reference."""
    stored, width = stored_of(w_uk), index_norm.weight.shape[0]
    heads, nope, latent = stored.shape
    index_heads = (q.shape[1] - heads * (nope + ROPE)) // width
    rank = qkv.shape[1] - latent - ROPE - width - index_heads
    served = serves(qkv, q, norm, places, cache) and is_whole(rank) and index_heads % 2 == 0
    if not isinstance(w_uk, Kept) or not served or not serves_indexer(index_norm, keys):
        return prologue_full.reference(qkv, q, stored, norm, index_norm, places, cache, keys, whole)
    check_index_cache(keys, width)
    index_q = torch.empty(q.shape[0], index_heads, width, dtype=torch.float8_e4m3fn, device=q.device)
    gates = torch.empty(q.shape[0], index_heads, dtype=torch.float32, device=q.device)
    scale = index_heads**-0.5 * width**-0.5
    indexer = dense(index_norm.weight), dense(index_norm.bias), keys, index_q, gates, float(index_norm.eps), scale
    return _launch(qkv, q, w_uk, norm, places, cache, rank, index_heads, indexer, whole), index_q, gates


# By hand: what is called here takes what `pack` made.
prologue_shared.on("sm90", pack=pack)(run_shared)
prologue_full.on("sm90", pack=pack)(run_full)


def pack_chain(qkv_weight: Tensor, q_weight: Tensor, w_uk: Tensor) -> tuple[Tensor | Kept, ...]:
    """The weights of `prologue_bf16` as the three launches want them."""
    return gemm.pack_bf16(qkv_weight), gemm.pack_bf16(q_weight), pack(w_uk)


@prologue_bf16.on("sm90", pack=pack_chain)
def run_chain(
    x: Tensor,
    qkv_weight: Tensor | Kept,
    q_weight: Any,
    w_uk: Tensor | Kept,
    q_norm: LatentNorm,
    norm: LatentNorm,
    index_norm: IndexNorm | None,
    places: Places,
    cache: Tensor,
    keys: Tensor | None,
) -> tuple[Tensor, ...]:
    """Three launches, each started while the one before it runs."""
    qkv = gemm.run_bf16(x, qkv_weight)
    q = gemm.run_normed(qkv[:, : q_norm.weight.shape[0]], q_norm.weight, q_norm.eps, q_weight)
    if index_norm is None or keys is None:
        return (run_shared(qkv, q, w_uk, norm, places, cache),)
    return run_full(qkv, q, w_uk, norm, index_norm, places, cache, keys)


def _launch(
    qkv: Tensor,
    q: Tensor,
    w_uk: Kept,
    norm: LatentNorm,
    places: Places,
    cache: Tensor,
    rank: int,
    index_heads: int,
    indexer: tuple[Any, ...],
    whole: bool,
) -> Tensor:
    heads, nope, latent = w_uk.stored.shape
    check_latent_cache(cache, latent + ROPE)
    rows = qkv.shape[0]
    expected = heads * (nope + ROPE) + index_heads * INDEX_WIDTH
    if q.shape != (rows, expected):
        raise ValueError(
            f"queries are {tuple(q.shape)} beside {rows} rows of {qkv.shape[1]}, expected [{rows}, {expected}]"
        )
    qkv, q, own = in_rows(qkv), in_rows(q), heads * (nope + ROPE)
    shape = rows, heads, latent + ROPE
    made = q[:, :own].unflatten(1, (heads, nope + ROPE)) if whole else q.new_empty(shape)
    if not rows:
        return made
    group, few = group_rows(rows), rows <= MOST_ROWS
    multiplying = heads * (latent // (SLICE * WARPS)) * -(-rows // group) if few and not whole else 0
    items = rows * (2 + -(-heads // 4) + (1 + index_heads // 2 if index_heads else 0))
    how = Launch(grid=(multiplying + -(-items // WARPS),), block=(32 * WARPS,), programmatic=True)
    kernel(nope, latent, index_heads, cache.dtype, whole)(
        how,
        qkv,
        q,
        w_uk.packed,
        dense(norm.weight),
        dense(places.cos),
        dense(places.sin),
        places.slots.to(torch.int32).contiguous(),
        cache,
        made,
        rows,
        heads,
        rank,
        qkv.stride(0),
        q.stride(0),
        group,
        multiplying,
        float(norm.eps),
        *indexer,
    )
    if not few and not whole:  # so many rows that the library is faster
        nope_part = q[:, :own].unflatten(1, (heads, nope + ROPE))[..., :nope]
        torch.bmm(nope_part.transpose(0, 1), w_uk.stored, out=made[..., :latent].transpose(0, 1))
    return made
