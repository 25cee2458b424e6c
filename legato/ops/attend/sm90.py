# pyright: basic
"""Sparse latent attention on Hopper: one launch for rows of any counts, driven by the counts on the device.

Owns the launch and the registration with PyTorch; how rows are cut is in `sm90_forms.py`. Must not read a tensor's values.
Imported by `bind` only.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache as cached

import torch
from torch import Tensor

from legato.ops.attend import sm90_masked, sparse_mla
from legato.ops.attend.sm90_forms import MOST_BYTES, Form, cut
from legato.ops.build import Kernel, Launch
from legato.ops.cache.layout import LATENT_ROPE, LATENT_WIDTH, check_latent_cache
from legato.ops.strides import dense

__all__ = ["sm90_masked"]  # attached by being imported

_WIDTH = LATENT_WIDTH + LATENT_ROPE
#: Slots that tokens are compared with before they are fetched early: one for each lane.
_MOST_STORED = 32


@cached
def kernel(form: Form) -> Kernel:
    """The kernel of a form."""
    return Kernel(form.source, "sparse_mla", shared_bytes=MOST_BYTES, non_portable_cluster=True)


@cached
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _readable(q: Tensor) -> Tensor:
    """Queries as the kernels read them: a row's heads one after the other, rows at multiples of 16 bytes."""
    dense = q.stride(2) == 1 and q.stride(1) == _WIDTH and q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0
    return q if dense else q.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("legato::sparse_mla", mutates_args=(), device_types="cuda")
def _attend(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, scale: float, stored: Tensor | None) -> Tensor:
    rows, heads, _ = q.shape
    q, cache = _readable(q), dense(cache)
    out = torch.empty(rows, heads, LATENT_WIDTH, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    width = slots.shape[1]
    how = cut(rows, heads, cache.dtype is torch.uint8, width, _processors(q.device))
    launch = Launch(
        grid=(how.across, -(-heads // how.form.heads)),
        block=(how.form.threads,),
        cluster=(how.blocks,) if how.blocks > 1 else None,
        shared_bytes=how.shared_bytes,
        programmatic=True,
    )
    arguments = (q, cache, slots, counts, out, heads, width, slots.stride(0), q.stride(0), scale / math.log(2))
    if how.form.stays:
        kernel(how.form)(launch, *arguments, rows)
    elif stored is not None and how.form.few:
        kernel(replace(how.form, early=True))(launch, *arguments, stored, stored.shape[0])
    else:
        kernel(how.form)(launch, *arguments)
    return out


@_attend.register_fake
def _(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, scale: float, stored: Tensor | None) -> Tensor:
    return q.new_empty(*q.shape[:2], LATENT_WIDTH)


@sparse_mla.on("sm90")
def sparse_mla_sm90(
    q: Tensor,
    cache: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    latent_dim: int,
    stored: Tensor | None = None,
) -> Tensor:
    """`sparse_mla` for bfloat16 queries on 512 + 64 wide tokens in a bfloat16 or 656-byte cache; any number of heads.

    Other types and widths: the reference, which never synchronises on a GPU. FP8 scales and, beyond 16 heads, each block's
    normalised sums pass through float16: latents of up to 65504. With `stored`, up to 16 heads and few rows, tokens are on
    their way before the kernel before has ended.
    """
    check_latent_cache(cache, q.shape[2])
    served = q.dtype is torch.bfloat16 and cache.dtype in (torch.bfloat16, torch.uint8)
    if not served or (latent_dim, q.shape[2]) != (LATENT_WIDTH, _WIDTH) or not cache.is_contiguous():
        return sparse_mla.reference(q, cache, slots, counts, scale, latent_dim)
    chosen = slots if slots.dtype is torch.int32 and slots.stride(1) == 1 else slots.to(torch.int32).contiguous()
    counts = counts.to(torch.int32).contiguous()
    # A conversion would be a kernel in between, and nothing would be gained.
    settled = chosen is slots and stored is not None and stored.dtype is torch.int32 and stored.is_contiguous()
    early = stored if settled and stored is not None and 0 < stored.shape[0] <= _MOST_STORED else None
    return torch.ops.legato.sparse_mla(q, cache, chosen, counts, scale, early)
