"""How many tokens the caches hold beside the weights in the memory of a GPU, or in the share of it that was given for both; and
whether weights fit this machine's memory at all.

Owns that arithmetic, which is done before anything is loaded. Must not touch a device or know how weights are counted. Called
by `legato.engine.start` and `legato bench slice`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

from legato.config import PAGE_SIZE, Config, ConfigError, Resolved
from legato.model.footprint import FILLED, cache_bytes
from legato.model.spec import ModelSpec

LOG = logging.getLogger(__name__)


def bytes_per_token(spec: ModelSpec, settings: Resolved) -> int:
    """What one token takes in both caches, in the formats of `settings`. Raises ConfigError for a latent that fp8 cannot hold."""
    cache = cache_bytes(spec)
    latent = {"bfloat16": cache.latent_bf16, "float32": 2 * cache.latent_bf16, "fp8": cache.latent_fp8}[settings.latent]
    if latent is None:
        raise ConfigError(f"latent fp8 takes blocks of 128, and this model's latent is {spec.kv_lora_rank} wide")
    if settings.index == "fp8":
        return latent + cache.index_keys
    return latent + cache.index_keys // (spec.index_dim + 4) * 4 * spec.index_dim


def host_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_weights(weight_bytes: int, memory_bytes: int, where: str, remedy: str) -> None:
    """Refuses weights that the memory of `where` does not hold: the system would end the process in the middle of loading. Raises
    ConfigError, which names the `remedy`."""
    if weight_bytes > memory_bytes:
        raise ConfigError(
            f"the weights take {weight_bytes / 1e9:.1f} GB, and {where} has {memory_bytes / 1e9:.1f} GB of memory: {remedy}"
        )


def within_memory(
    settings: Resolved, config: Config, spec: ModelSpec, weigh: Callable[[], int], gpu_bytes: int
) -> Resolved:
    """`settings` with caches that, beside one rank's weights, take the share of a GPU that `memory_fraction` names. Without
    one they are as large as they were, if weights and caches keep within `FILLED` so, else as large as that allows. A
    context that nobody asked for is lowered to what the caches hold. A number of tokens that was given stands: then nothing is
    weighed. `weigh`: the bytes of a rank's weights.

    Raises:
        ConfigError: there is no room for the context, or for anything.
    """
    if config.cache.tokens is not None:
        return settings
    weight_bytes = weigh()
    fraction = FILLED if config.cache.memory_fraction is None else config.cache.memory_fraction
    free = round(fraction * gpu_bytes) - weight_bytes
    tokens = max(free, 0) // (bytes_per_token(spec, settings) * PAGE_SIZE) * PAGE_SIZE
    if config.cache.memory_fraction is None:
        tokens = min(tokens, settings.cache_tokens)
    context = min(settings.context, tokens - PAGE_SIZE) if config.schedule.context is None else settings.context
    if context < 2 or tokens < context + PAGE_SIZE:
        raise ConfigError(
            f"memory_fraction {fraction:g} of {gpu_bytes / 1e9:.1f} GB leaves room for {tokens:,} tokens beside"
            f" {weight_bytes / 1e9:.1f} GB of weights, and a context of {max(context, 2):,} needs"
            f" {max(context, 2) + PAGE_SIZE:,}: raise it, or use more GPUs (--tp), --latent fp8 or a smaller --context"
        )
    if context < settings.context:
        LOG.info("context %d: what %g of the GPU's memory holds beside the weights", context, fraction)
    return replace(settings, cache_tokens=tokens, context=context)
