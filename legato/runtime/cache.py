"""The two paged caches: latents on every layer, index keys on layers that run their own indexer. One page table serves both.

Owns allocation. Layouts are those of `legato.ops.cache.layout`; which page belongs to whom is the scheduler's business.
Called by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.config import PAGE_SIZE, ConfigError
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache
from legato.ops.cache.layout import INDEX_PAGE_BYTES, INDEX_WIDTH, LATENT_BYTES, LATENT_ROPE, LATENT_WIDTH


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shapes and dtypes of one layer's caches for `num_pages` pages. `latent`/`index` as in `legato.config.Resolved`.

    Raises:
        ConfigError: the fp8 layouts exist for GLM-5.2's widths only (latent 512 + 64, index keys 128).
    """

    spec: ModelSpec
    latent: str
    index: str

    def __post_init__(self) -> None:
        spec = self.spec
        if self.latent == "fp8" and (spec.kv_lora_rank, spec.rope_dim) != (LATENT_WIDTH, LATENT_ROPE):
            raise ConfigError(
                f"the fp8 latent cache holds {LATENT_WIDTH} + {LATENT_ROPE} values per token; this checkpoint has "
                f"{spec.kv_lora_rank} + {spec.rope_dim}: use the bfloat16 cache"
            )
        if self.index == "fp8" and spec.index_dim != INDEX_WIDTH:
            raise ConfigError(
                f"the fp8 index cache holds keys of {INDEX_WIDTH} values; this checkpoint has {spec.index_dim}: use float32"
            )

    def latent_page(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one page of latents."""
        if self.latent == "fp8":
            return (PAGE_SIZE, LATENT_BYTES), torch.uint8
        dtype = torch.float32 if self.latent == "float32" else torch.bfloat16
        return (PAGE_SIZE, self.spec.kv_lora_rank + self.spec.rope_dim), dtype

    def index_page(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one page of index keys."""
        if self.index == "fp8":
            return (INDEX_PAGE_BYTES,), torch.uint8
        return (PAGE_SIZE, self.spec.index_dim), torch.float32

    def allocate(self, num_pages: int, device: str) -> list[LayerCache]:
        """One cache per target layer, then one for the MTP layer if there is one. Zeroed: an unwritten slot is never NaN."""
        return self.allocate_in_turn(num_pages, device, self.num_layers)

    @property
    def num_layers(self) -> int:
        """Layers with a cache: the target's, and the MTP layer if there is one."""
        return self.spec.num_layers + int(self.spec.has_mtp)

    def allocate_in_turn(self, num_pages: int, device: str, num_latents: int) -> list[LayerCache]:
        """The same with `num_latents` latent caches that the layers use in turn: for measurements that need a long context's
        addresses and not its contents."""
        latents = [_zeros(num_pages, self.latent_page(), device) for _ in range(min(num_latents, self.num_layers))]
        return [
            LayerCache(
                latent=latents[layer % len(latents)],
                index=_zeros(num_pages, self.index_page(), device) if self.spec.is_full(layer) else None,
            )
            for layer in range(self.num_layers)
        ]


def _zeros(num_pages: int, page: tuple[tuple[int, ...], torch.dtype], device: str) -> Tensor:
    shape, dtype = page
    return torch.zeros((num_pages, *shape), dtype=dtype, device=device)
