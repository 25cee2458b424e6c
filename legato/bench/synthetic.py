"""Requests in the middle of their answers without a prompt having run: lengths, pages and cache contents are written directly.

Owns what such a state holds: latents and index keys of unit variance under random tokens. Must not be used to generate. Called by
`legato.bench.steady`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.config import MAX_DRAFTS, PAGE_SIZE
from legato.ops import store_index_keys, store_latent
from legato.plan import Admit, Plan
from legato.runtime.runner import Runner

CHUNK = 1 << 15
"""Tokens written at a time."""


@dataclass(frozen=True, slots=True)
class Standing:
    """`batch` requests that hold `context` tokens each, with pages for `headroom` more."""

    batch: int
    context: int
    headroom: int

    @property
    def pages_each(self) -> int:
        """Pages of one request."""
        return -(-(self.context + self.headroom + MAX_DRAFTS) // PAGE_SIZE)

    @property
    def num_pages(self) -> int:
        """Pages of all, the dummy page included."""
        return self.batch * self.pages_each + 1

    @property
    def rows(self) -> tuple[int, ...]:
        """Their device rows."""
        return tuple(range(1, self.batch + 1))

    def pages(self, row: int) -> tuple[int, ...]:
        """Physical pages of a row, in order."""
        first = 1 + (row - 1) * self.pages_each
        return tuple(range(first, first + self.pages_each))


@torch.inference_mode()
def stand(runner: Runner, standing: Standing, seed: int = 0) -> None:
    """Puts the requests into the runner's rows (greedy, without stops), their caches filled and their next tokens drawn.

    The runner has room for exactly these: `standing.num_pages` pages, and rows of `pages_each` pages.
    """
    admits = tuple(
        Admit(
            row, standing.pages(row), standing.pages_each * PAGE_SIZE, (), temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
            seed=row, logprobs=-1,
        )
        for row in standing.rows
    )  # fmt: skip
    # The iteration that admits them runs on empty rows; what it leaves is written over.
    runner.launch(Plan(0, admits, (), standing.rows, num_drafts=runner.settings.num_drafts)).outcome()
    device = runner.rows.tokens.device
    generator = torch.Generator(device).manual_seed(seed)
    _fill_caches(runner, generator)
    tokens = runner.rows.tokens
    tokens.random_(0, runner.spec.vocab_size, generator=generator)
    runner.rows.lengths[1:].fill_(standing.context)
    runner.rows.done[1:].fill_(False)
    runner.rows.drafted[1:].fill_(runner.settings.num_drafts)


def _fill_caches(runner: Runner, generator: torch.Generator) -> None:
    """Every layer the same numbers: which of them a layer reads, its own queries decide."""
    spec, caches = runner.spec, runner.iteration.caches
    device, dtype = runner.rows.tokens.device, runner.iteration.target.weights.embed.dtype
    num_tokens = caches[0].latent.shape[0] * PAGE_SIZE

    def normal(count: int, width: int) -> torch.Tensor:
        return torch.empty(count, width, dtype=dtype, device=device).normal_(generator=generator)

    filled: set[int] = set()
    for first in range(PAGE_SIZE, num_tokens, CHUNK):
        count = min(CHUNK, num_tokens - first)
        slots = torch.arange(first, first + count, device=device)
        latent, rope_key = normal(count, spec.kv_lora_rank), normal(count, spec.rope_dim)
        keys = normal(count, spec.index_dim)
        filled.clear()
        for cache in caches:
            # Layers may share memory; the references serve any number of rows.
            if cache.latent.data_ptr() not in filled:
                store_latent.reference(cache.latent, latent, rope_key, slots)
                filled.add(cache.latent.data_ptr())
            if cache.index is not None:
                store_index_keys.reference(cache.index, keys, slots)
