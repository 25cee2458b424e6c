# pyright: basic
"""Sparse latent attention on Hopper: one launch of `sparse_mla.cu` for rows of any counts, driven by the counts on the device.

Owns how many thread blocks share a row, from what the host knows (rows, heads and width), and the registration with
PyTorch. Must not read a tensor's values. Imported by `bind` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.attend import sparse_mla
from legato.ops.build import Kernel, Launch, Source
from legato.ops.cache.layout import LATENT_BYTES, LATENT_ROPE, LATENT_WIDTH, check_latent_cache

THREADS = 256
#: Entries of a selection that one block takes at a time.
UNIT = 128
#: Up to so many rows the cut of a row depends on the width alone, so that its bits depend on no other row.
INVARIANT_ROWS = 16
_MOST_BLOCKS = 16
_HEADS = (8, 16, 32, 64)
#: Two blocks share a multiprocessor up to this size, and do not from the next kilobyte on.
_HALF_BYTES = 113 * 1024
_MOST_BYTES = 227 * 1024
_WIDTH = LATENT_WIDTH + LATENT_ROPE
_SOURCE = Path(__file__).with_name("sparse_mla.cu")


@dataclass(frozen=True)
class Form:
    """One compiled form of the kernel: heads of a block, and whether the cache is of the 656-byte layout."""

    heads: int
    packed: bool

    @property
    def shared_bytes(self) -> int:
        """As the source lays its shared memory out."""
        tokens = UNIT * (LATENT_BYTES if self.packed else 2 * _WIDTH)
        weights = 2 * self.heads * UNIT if self.packed else 0
        inbox = 4 * LATENT_WIDTH * self.heads if self.heads < 32 else 0
        small = self.heads * (8 * _MOST_BLOCKS + 4 * 8 + 4) + (4 * self.heads + 8 * UNIT if self.packed else 0)
        return tokens + 2 * self.heads * _WIDTH + weights + inbox + small + 16

    @property
    def source(self) -> Source:
        """With its macros: see there."""
        small = self.packed and self.heads == 8
        return Source(
            _SOURCE,
            {
                "HEADS": self.heads,
                "FP8": int(self.packed),
                "RESIDENT": 2 if small else 1,
                "BATCH": 4 if self.heads in (16, 32) else 2,
                "SHARED_BYTES": self.shared_bytes,
            },
        )


FORMS = tuple(Form(heads, packed) for heads in _HEADS for packed in (False, True))


@cached
def kernel(form: Form) -> Kernel:
    """The kernel of a form."""
    return Kernel(form.source, "sparse_mla", shared_bytes=_MOST_BYTES, non_portable_cluster=True)


@cached
def cut(rows: int, head_blocks: int, width: int, processors: int) -> int:
    """Thread blocks that share a row: a power of two.

    Up to `INVARIANT_ROWS` rows as many as a selection of this width has units, at most 16. Beyond, the number that takes
    the fewest units in a row on one multiprocessor; half a unit stands for what every block costs.
    """
    units = max(1, -(-width // UNIT))
    most = min(_MOST_BLOCKS, 1 << (units - 1).bit_length())
    if rows <= INVARIANT_ROWS:
        return most

    def cost(blocks: int) -> tuple[float, int]:
        waves = -(-rows * head_blocks * blocks // processors)
        return waves * (-(-units // blocks) + 0.5), blocks

    return min((1 << power for power in range(most.bit_length())), key=cost)


@cached
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.library.custom_op("legato::sparse_mla", mutates_args=(), device_types="cuda")
def _attend(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, scale: float) -> Tensor:
    rows, heads, _ = q.shape
    out = torch.empty(rows, heads, LATENT_WIDTH, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    form = Form(next((most for most in _HEADS if heads <= most), _HEADS[-1]), cache.dtype is torch.uint8)
    head_blocks = -(-heads // form.heads)
    blocks = cut(rows, head_blocks, slots.shape[1], _processors(q.device))
    alone = rows * blocks * head_blocks <= _processors(q.device)  # then two blocks shall not share a multiprocessor
    how = Launch(
        grid=(rows * blocks, head_blocks),
        block=(THREADS,),
        cluster=(blocks,) if blocks > 1 else None,
        shared_bytes=max(form.shared_bytes, _HALF_BYTES + 1024) if alone else form.shared_bytes,
        programmatic=True,
    )
    log2_scale = scale / math.log(2)
    kernel(form)(how, q, cache, slots, counts, out, heads, slots.shape[1], slots.stride(0), q.stride(0), log2_scale)
    return out


@_attend.register_fake
def _(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:2], LATENT_WIDTH)


def _reads(q: Tensor) -> Tensor:
    """Queries as the kernel reads them: a row's heads one after the other, rows at multiples of 16 bytes."""
    dense = q.stride(2) == 1 and q.stride(1) == _WIDTH and q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0
    return q if dense else q.clone(memory_format=torch.contiguous_format)


@sparse_mla.on("sm90")
def sparse_mla_sm90(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, scale: float, latent_dim: int) -> Tensor:
    """`sparse_mla` for bfloat16 queries on 512 + 64 wide tokens in a bfloat16 or 656-byte cache; any number of heads.

    Other types and widths: the reference, which never synchronises on a GPU. An FP8 token's scale is rounded to float16:
    exact for the powers of two from 2^-24 to 2^15 that the layout can hold.
    """
    check_latent_cache(cache, q.shape[2])
    served = q.dtype is torch.bfloat16 and cache.dtype in (torch.bfloat16, torch.uint8)
    if not served or (latent_dim, q.shape[2]) != (LATENT_WIDTH, _WIDTH) or not cache.is_contiguous():
        return sparse_mla.reference(q, cache, slots, counts, scale, latent_dim)
    chosen = slots if slots.dtype is torch.int32 and slots.stride(1) == 1 else slots.to(torch.int32).contiguous()
    return torch.ops.legato.sparse_mla(_reads(q), cache, chosen, counts.to(torch.int32).contiguous(), scale)
