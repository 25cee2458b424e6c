"""How a token lies in the two caches: the latent of attention and the key of the indexer.

Owns the byte layouts and the rounding of scales. Plain functions, not ops. Called by `cache`, `prologue`, `score` and
`attend`.

Latent cache, one of
  float32 or bfloat16 [pages, 64, C+R]: the normalised latent, then the rotated rope key;
  uint8 [pages, 64, 656], C = 512, R = 64 only: 512 e4m3, 4 float32 scales (one per 128, powers of two rounded up), 64
bfloat16. Index cache, one of
  float32 [pages, 64, X]: unquantised, for oracles;
  uint8 [pages, 8448], X = 128 only: 64 keys of 128 e4m3, then 64 float32 scales (powers of two rounded up).
"""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 64
E4M3_MAX = 448.0
#: Below this the scale stops shrinking, so that a zero group has a finite one.
AMAX_FLOOR = 1e-4

LATENT_WIDTH, LATENT_GROUP, LATENT_ROPE = 512, 128, 64
LATENT_BYTES = LATENT_WIDTH + 4 * (LATENT_WIDTH // LATENT_GROUP) + 2 * LATENT_ROPE
INDEX_WIDTH = 128
INDEX_KEY_BYTES = PAGE * INDEX_WIDTH
INDEX_PAGE_BYTES = INDEX_KEY_BYTES + 4 * PAGE


def power_of_two_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(max(amax, 1e-4) / 448)), exactly: the mantissa is rounded up into the exponent. float32 in and out,
    same shape.

    Source: the "ue8m0" scales of DeepSeek-V3.2 and of FlashMLA, which reads them truncated to a power of two on some
    GPUs.
    """
    ratio = amax.clamp_min(AMAX_FLOOR) / E4M3_MAX
    return ((ratio.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] float32 -> (e4m3 [..., n], scale float32 [..., 1]) with one power-of-two scale over the last
    dimension."""
    scale = power_of_two_scale(x.abs().amax(-1, keepdim=True))
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def e4m3_to_float(codes: Tensor) -> Tensor:
    """e4m3 -> float32, exactly, for finite codes; no cache or query holds another.

    The sign-extended byte shifted left by 7 is, but for a stray copy of the sign in bit 14, the float16 of the value
    divided by 256. Several times faster on a CPU than the library's conversion.
    """
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    halves = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(-0x4001).view(torch.float16)
    return halves.to(torch.float32).mul_(256.0)


def index_page_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The uint8 index cache [pages, 8448] seen as (keys e4m3 [pages, 64, 128], scales float32 [pages, 64]); both write
    through."""
    keys = cache[:, :INDEX_KEY_BYTES].unflatten(1, (PAGE, INDEX_WIDTH)).view(torch.float8_e4m3fn)
    return keys, cache.view(torch.float32)[:, INDEX_KEY_BYTES // 4 :]


def latent_row_width(cache: Tensor) -> int:
    """C + R: how many numbers a row of a latent cache holds."""
    return LATENT_WIDTH + LATENT_ROPE if cache.dtype == torch.uint8 else cache.shape[-1]


def check_latent_cache(cache: Tensor, width: int) -> None:
    """ValueError unless `cache` is one of the latent layouts for rows of `width` = C+R numbers."""
    packed = cache.dtype == torch.uint8
    if not packed and cache.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"a latent cache is float32, bfloat16 or uint8, found {cache.dtype}")
    if packed and width != LATENT_WIDTH + LATENT_ROPE:
        raise ValueError(f"the 656-byte layout holds 512 + 64 numbers, found rows of {width}; use float32 or bfloat16")
    expected = (PAGE, LATENT_BYTES if packed else width)
    if tuple(cache.shape[1:]) != expected:
        raise ValueError(f"latent cache has pages of {tuple(cache.shape[1:])}, expected {expected}")


def check_index_cache(cache: Tensor, width: int) -> None:
    """ValueError unless `cache` is one of the index layouts for keys of `width` = X numbers."""
    if cache.dtype == torch.uint8:
        if width != INDEX_WIDTH or tuple(cache.shape[1:]) != (INDEX_PAGE_BYTES,):
            raise ValueError(
                f"a uint8 index cache is [pages, {INDEX_PAGE_BYTES}] for keys of {INDEX_WIDTH},"
                f" found {tuple(cache.shape)} and keys of {width}"
            )
    elif cache.dtype != torch.float32 or tuple(cache.shape[1:]) != (PAGE, width):
        found = f"{cache.dtype} {tuple(cache.shape)}"
        raise ValueError(f"an index cache is float32 [pages, {PAGE}, {width}] or uint8, found {found}")
