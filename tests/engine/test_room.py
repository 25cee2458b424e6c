"""Caches that fill a share of a GPU's memory: what they hold, and what is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from legato.config import (
    PAGE_SIZE,
    CacheConfig,
    Config,
    ConfigError,
    ExecutionConfig,
    Resolved,
    ScheduleConfig,
    resolve,
)
from legato.engine.room import within_memory
from legato.engine.start import _least_memory, load_rank, open_checkpoint
from legato.model.checkpoint import Checkpoint
from legato.model.footprint import plan, weights_per_rank
from legato.model.inventory import stored_spec, survey
from legato.model.lean import DraftWeights, Saving, added_bytes
from legato.model.requantization import AS_STORED, Requantization
from legato.model.weights import Residency, load_weights

GPU_BYTES = 400_000_000
PER_TOKEN = {("bfloat16", "fp8"): 8460, ("fp8", "fp8"): 4988, ("float32", "float32"): 2 * (8460 - 396) + 3 * 128 * 4}
"""Of the checkpoint in the package: latents of 7 layers, index keys of 3, 132 bytes each in fp8."""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(None)


def settled(checkpoint: Checkpoint, config: Config, ranks: int = 1) -> Resolved:
    spec = stored_spec(checkpoint)
    settings = resolve(config, max_position=spec.max_position, has_mtp=True, cuda_available=True)
    inventory = survey(checkpoint, spec)
    return within_memory(settings, config, spec, lambda: weights_per_rank(inventory, spec, ranks, None), GPU_BYTES)


@pytest.mark.parametrize(("latent", "index"), PER_TOKEN)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_and_caches_fill_the_share(checkpoint: Checkpoint, latent: str, index: str, ranks: int) -> None:
    config = Config(cache=CacheConfig(latent, index, memory_fraction=0.5))  # type: ignore[arg-type]
    found = settled(checkpoint, config, ranks)
    weights = plan(checkpoint, ranks=(ranks,)).plans[0].total_weight_bytes
    filled = weights + found.cache_tokens * PER_TOKEN[latent, index]
    assert 0 <= GPU_BYTES / 2 - filled < PAGE_SIZE * PER_TOKEN[latent, index] and found.cache_tokens % PAGE_SIZE == 0
    assert found.context == min(8192, found.cache_tokens - PAGE_SIZE)


def test_weights_beyond_the_memory_of_this_machine_are_refused_before_they_are_loaded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legato.engine.start.host_bytes", lambda: 60_000_000)
    monkeypatch.setattr("legato.engine.start.load_weights", lambda *_, **__: pytest.fail("nothing must be loaded"))
    config = Config(execution=ExecutionConfig(device="cpu"))
    with pytest.raises(
        ConfigError, match=r"the weights take [\d.]+ GB, and this machine has 0\.1 GB of memory: .*--device cuda"
    ):
        load_rank(config, checkpoint)


def test_a_context_that_was_asked_for_must_fit(checkpoint: Checkpoint) -> None:
    def sized(fraction: float, context: int | None) -> Resolved:
        cache = CacheConfig("bfloat16", "fp8", memory_fraction=fraction)
        return settled(checkpoint, Config(cache=cache, schedule=ScheduleConfig(context=context)))

    assert sized(0.1, 512).context == 512
    assert 512 < sized(0.1, None).context < 8192, "what fits"
    for fraction, context in ((0.1, 8192), (0.01, None)):
        with pytest.raises(ConfigError, match=r"memory_fraction 0\.0?1 of 0\.4 GB leaves room for .* tokens beside"):
            sized(fraction, context)


def test_where_nothing_is_said_caches_are_no_larger_than_there_is_room(checkpoint: Checkpoint) -> None:
    spec = stored_spec(checkpoint)
    weight_bytes = weights_per_rank(survey(checkpoint, spec), spec, 1, None)

    def within(config: Config, gpu_bytes: int) -> tuple[Resolved, Resolved]:
        settings = resolve(config, max_position=spec.max_position, has_mtp=True, cuda_available=True)
        return settings, within_memory(settings, config, spec, lambda: weight_bytes, gpu_bytes)

    wanted, large = within(Config(), 150 * 10**9)
    assert large == wanted
    _, small = within(Config(), 60_000_000)
    assert small.cache_tokens < wanted.cache_tokens and small.context == small.cache_tokens - PAGE_SIZE < 8192
    settings, given = within(Config(cache=CacheConfig(tokens=10**7)), 60_000_000)
    assert given == settings
    with pytest.raises(ConfigError, match=r"leaves room for 0 tokens beside 0\.0 GB of weights"):
        within(Config(), 20_000_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantised_weights_count_what_they_take(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    spec = stored_spec(checkpoint)
    loaded = load_weights(checkpoint, spec, device="cpu", dtype=dtype, resident=Residency.DENSE)
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages(loaded)}.values())
    counted = weights_per_rank(survey(checkpoint, spec), spec, 1, dtype.itemsize)
    assert abs(counted - held) < 0.02 * held, (counted, held)


@pytest.mark.parametrize("text", ["table,head", "head,vocabulary=1000"])
def test_what_drafts_add_counts(checkpoint: Checkpoint, text: str) -> None:
    spec, drafts = stored_spec(checkpoint), DraftWeights.parse(text)

    def held(again: Requantization) -> int:
        made = load_weights(
            checkpoint, spec, device="cpu", dtype=torch.bfloat16, resident=Residency.STORED, again=again
        )
        assert made.mtp is not None
        return sum({one.data_ptr(): one.nbytes() for one in storages((made.mtp.eh_proj, made.draft_head))}.values())

    added = held(Requantization(drafts)) - held(AS_STORED)
    counted = added_bytes(spec, drafts, 1, 2)
    halved = spec.hidden_size**2 * 2 if Saving.TABLE in drafts.savings else 0
    assert abs(counted - (added + halved)) < 10_000 and counted > 256_000, (counted, added)
    split = added_bytes(spec, DraftWeights.FASTEST, 4, 2)
    assert split == added_bytes(spec, DraftWeights.FASTEST, 1, 2) // 4
    assert added_bytes(replace(spec, has_mtp=False), drafts, 1, 2) == added_bytes(spec, DraftWeights.STORED, 1, 2) == 0


def storages(value: object) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif is_dataclass(value):
        for field in fields(value):
            yield from storages(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from storages(one)


def test_ranks_on_gpus_of_different_sizes_have_the_same_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cuda": 5, "cuda:0": 5, "cuda:1": 3, "cuda:2": 4}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda name: SimpleNamespace(total_memory=sizes[name]))
    assert [_least_memory(f"cuda:{rank}", 3) for rank in range(3)] == [3, 3, 3]
    assert (_least_memory("cuda", 1), _least_memory("cuda:2", 1)) == (5, 4), "one rank has its own"


def test_a_cpu_has_none(checkpoint: Checkpoint) -> None:
    config = Config(cache=CacheConfig(memory_fraction=0.5), execution=ExecutionConfig(device="cpu"))
    with pytest.raises(ConfigError, match="on a CPU give --cache-tokens"):
        load_rank(config, checkpoint)
    with pytest.raises(ConfigError, match="above 0 and at most 1, got 0"):
        Config(cache=CacheConfig(memory_fraction=0.0))
