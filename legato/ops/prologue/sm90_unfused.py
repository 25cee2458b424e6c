# pyright: basic
"""The prologue of a layer as a chain of single steps: what `sm90.py` is measured against.

Owns the chain: 10 launches, and on full layers 12 of the indexer (with the Hadamard transforms that production kernels apply to
queries and keys, and that cancel in their product). Must not be a target of `bind` by default. Asked for by name:
`legato bench ops prologue -i sm90_unfused`. Products are this package's own, so that only what stands between them differs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.gemm import sm90, sm90_heads
from legato.ops.gemm.sm90_packing import Kept, stored_of
from legato.ops.prologue import IndexNorm, LatentNorm, Places, prologue_bf16

_SOURCE = Source(Path(__file__).with_name("sm90_unfused.cu"))
_WARPS = 4
_ROPE, _INDEX, _LATENT = 64, 128, 512


@cache
def kernel(name: str) -> Kernel:
    """One step."""
    return Kernel(_SOURCE, name)


def _step(name: str, items: int, *arguments: object) -> None:
    """A launch with a warp per item."""
    kernel(name)(Launch(grid=(-(-items // _WARPS),), block=(32 * _WARPS,)), *arguments)


def pack(
    qkv_weight: Tensor, q_weight: Tensor, w_uk: Tensor
) -> tuple[tuple[Tensor | Kept, ...], tuple[Tensor | Kept, ...], Tensor | Kept]:
    """Each matrix by itself: (q_a with kv_a, wk, weights_proj), (q_b, wq_b), w_uk; the indexer's only where there is one."""
    heads, nope, _ = w_uk.shape
    own = heads * (nope + _ROPE)
    index_heads = (q_weight.shape[0] - own) // _INDEX
    if not index_heads:
        return (sm90.pack_bf16(qkv_weight),), (sm90.pack_bf16(q_weight),), sm90_heads.pack(w_uk.transpose(1, 2))
    inputs = qkv_weight.split((qkv_weight.shape[0] - _INDEX - index_heads, _INDEX, index_heads))
    queries = q_weight.split((own, q_weight.shape[0] - own))
    return (
        tuple(sm90.pack_bf16(part) for part in inputs),
        tuple(sm90.pack_bf16(part) for part in queries),
        sm90_heads.pack(w_uk.transpose(1, 2)),
    )


@prologue_bf16.on("sm90_unfused", pack=pack)
def run(
    x: Tensor,
    qkv_weight: Any,
    q_weight: Any,
    w_uk: Tensor | Kept,
    q_norm: LatentNorm,
    norm: LatentNorm,
    index_norm: IndexNorm | None,
    places: Places,
    cache: Tensor,
    keys: Tensor | None,
) -> tuple[Tensor, ...]:
    """The chain over weights that `pack` took apart, for a bfloat16 latent cache and byte keys. Raises ValueError for others."""
    if x.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16 or (keys is not None and keys.dtype != torch.uint8):
        raise ValueError(
            f"the unfused chain takes bfloat16 rows and latents and byte keys, not {x.dtype}, {cache.dtype}"
        )
    rows, rank = x.shape[0], q_norm.weight.shape[0]
    cos, sin, slots = places.cos, places.sin, places.slots.to(torch.int32)

    def normed(of: Tensor, how: LatentNorm) -> Tensor:
        made = torch.empty(rows, how.weight.shape[0], dtype=of.dtype, device=of.device)
        _step("norm_rows", rows, of, how.weight, made, rows, made.shape[1], of.stride(0), float(how.eps))
        return made

    qkv = sm90.run_bf16(x, qkv_weight[0])
    q_lora = normed(qkv[:, :rank], q_norm)
    latent = normed(qkv[:, rank : rank + _LATENT], norm)
    rope_key = qkv[:, rank + _LATENT :]
    _step("rotate", rows, rope_key, cos, sin, rows, 1, qkv.stride(0), _ROPE)
    _step("store_latents", rows, latent, rope_key, slots, cache, rows, qkv.stride(0))

    q = sm90.run_bf16(q_lora, q_weight[0])
    heads = stored_of(w_uk).shape[0]
    head_dim = q.shape[1] // heads
    q = q.view(rows, heads, head_dim)
    rope = q[..., head_dim - _ROPE :]
    _step("rotate", rows * heads, rope, cos, sin, rows, heads, q.stride(0), head_dim)
    absorbed = torch.empty(rows, heads, _LATENT + _ROPE, dtype=x.dtype, device=x.device)
    absorbed[..., :_LATENT] = sm90_heads.run(q[..., : head_dim - _ROPE], w_uk)
    absorbed[..., _LATENT:] = rope

    if index_norm is None or keys is None:
        return (absorbed,)
    index_q, gates = _indexed(x, q_lora, qkv_weight[1:], q_weight[1], index_norm, places, keys)
    return absorbed, index_q, gates


def _indexed(
    x: Tensor,
    q_lora: Tensor,
    inputs: tuple[Tensor, Tensor],
    wq_b: Tensor,
    norm: IndexNorm,
    places: Places,
    keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """The indexer's twelve."""
    rows, cos, sin = x.shape[0], places.cos, places.sin
    index_q = sm90.run_bf16(q_lora, wq_b)
    heads = index_q.shape[1] // _INDEX
    key, raw_gates = (sm90.run_bf16(x, weight) for weight in inputs)
    _step("norm_keys", rows, key, norm.weight, norm.bias, rows, float(norm.eps))
    _step("rotate", rows * heads, index_q, cos, sin, rows, heads, index_q.stride(0), _INDEX)
    _step("rotate", rows, key, cos, sin, rows, 1, _INDEX, _INDEX)
    _step("hadamard", rows * heads, index_q, rows * heads)
    _step("hadamard", rows, key, rows)

    def quantized(vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
        codes = torch.empty(vectors.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(count, dtype=torch.float32, device=x.device)
        _step("quantize", count, vectors, codes, scales, count)
        return codes, scales

    codes, scales = quantized(index_q, rows * heads)
    key_codes, key_scales = quantized(key, rows)
    gates = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
    constant = heads**-0.5 * _INDEX**-0.5
    how = Launch(grid=(-(-rows * heads // 128),), block=(128,))
    kernel("scale_gates")(how, raw_gates, scales, gates, rows * heads, constant)
    _step("store_keys", rows, key_codes, key_scales, places.slots.to(torch.int32), keys, rows)
    return codes.view(rows, heads, _INDEX), gates
