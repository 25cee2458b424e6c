"""The model against transformers' GlmMoeDsaForCausalLM, past `index_topk`, however the rows are cut and batched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from legato.config import CacheConfig, Config, ExecutionConfig, Resolved, ScheduleConfig, resolve
from legato.model.checkpoint import Checkpoint
from legato.model.spec import ModelSpec
from legato.model.weights import GlmWeights, Residency, load_weights
from legato.plan import Admit, Extend, Plan
from legato.runtime.batch import build_batch
from legato.runtime.runner import Runner
from tests.tiny import tiny_config

LENGTH = 200
TOLERANCE = 1e-4


def oracle_config() -> dict[str, object]:
    """The tiny configuration without an MTP layer, which transformers does not have."""
    return tiny_config(num_nextn_predict_layers=0, mlp_layer_types=["dense"] * 2 + ["sparse"] * 5)


class Oracle:
    """A random transformers model with every norm and bias randomised, and its checkpoint on disk."""

    def __init__(self, folder: Path) -> None:
        transformers = pytest.importorskip("transformers")  # here: every process that collects tests would import it
        torch.manual_seed(7)
        config = transformers.GlmMoeDsaConfig(**{k: v for k, v in oracle_config().items() if k != "architectures"})
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        self.model = transformers.GlmMoeDsaForCausalLM(config).eval().float()
        for name, parameter in list(self.model.named_parameters()) + list(self.model.named_buffers()):
            if name.endswith("norm.weight") or "layernorm" in name:
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
            elif name.endswith("k_norm.bias"):
                parameter.data = 0.1 * torch.randn_like(parameter)
            elif name.endswith("e_score_correction_bias"):
                parameter.data = 0.3 * torch.randn_like(parameter)
        for layer in self.model.model.layers:
            # One epsilon everywhere, as the engines and the training code have it; transformers hard-codes 1e-6 here.
            layer.self_attn.q_a_layernorm.variance_epsilon = 1e-5
            layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5
        self.model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(oracle_config()))
        self.folder = folder
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of every token; computed once for each text."""
        text = tuple(ids)
        if text not in self._known:
            self._known[text] = self.model(torch.tensor([text])).logits[0]
        return self._known[text]


class Engineless:
    """Drives a runner's own batches, caches and layers by hand, and keeps every row's logits."""

    def __init__(self, spec: ModelSpec, weights: GlmWeights) -> None:
        self.settings = exact_settings(spec)
        self.runner = Runner(spec, weights, self.settings)
        self.spec = spec
        self._next_page = 1

    def admit(self, row: int, length: int) -> None:
        pages = tuple(range(self._next_page, self._next_page + -(-length // 64)))
        self._next_page += len(pages)
        self.runner.rows.admit(Admit(row, pages, length, (), 0.0, 0, 1.0, 0.0, 0, -1))

    @torch.inference_mode()
    def extend(self, extends: Sequence[Extend]) -> Tensor:
        batch = build_batch(Plan(0, (), tuple(extends), ()), self.runner.rows, self.spec)
        hidden = self.runner.iteration.target.hidden(batch.ids, batch.step, self.runner.iteration.caches)
        return self.runner.iteration.target.logits(hidden)


def exact_settings(spec: ModelSpec) -> Resolved:
    config = Config(
        cache=CacheConfig(latent="float32", index="float32", tokens=64 * 64),
        schedule=ScheduleConfig(max_running=8),
        execution=ExecutionConfig(device="cpu"),
        num_drafts=0,
    )
    return resolve(config, max_position=spec.max_position, has_mtp=False, cuda_available=False)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def loaded(oracle: Oracle) -> tuple[ModelSpec, GlmWeights]:
    checkpoint = Checkpoint.open(oracle.folder)
    spec = ModelSpec.from_config(checkpoint.config)
    return spec, load_weights(checkpoint, spec, device="cpu", dtype=torch.float32, resident=Residency.DENSE)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def engineless(loaded: tuple[ModelSpec, GlmWeights]) -> Engineless:
    return Engineless(*loaded)


def chunks(ids: Sequence[int], size: int, row: int = 1) -> Iterator[Extend]:
    for start in range(0, len(ids), size):
        stop = min(start + size, len(ids))
        yield Extend(row, start, tuple(ids[start:stop]), None)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max().item() <= TOLERANCE


def test_full_prefill(engineless: Engineless, oracle: Oracle, ids: list[int]) -> None:
    engineless.admit(1, LENGTH)
    assert_close(engineless.extend([Extend(1, 0, tuple(ids), None)]), oracle.logits(ids))


def test_the_context_is_past_index_topk(loaded: tuple[ModelSpec, GlmWeights]) -> None:
    assert 10 * loaded[0].index_topk < LENGTH


USUAL = (1, 3, 7, 8, 17)


@pytest.mark.parametrize(
    "size", [size if size in USUAL else pytest.param(size, marks=pytest.mark.full) for size in range(1, 18)]
)
def test_chunks(engineless: Engineless, oracle: Oracle, ids: list[int], size: int) -> None:
    """Chunk size 1 is token by token."""
    engineless.admit(1, LENGTH)
    rows = [engineless.extend([chunk]) for chunk in chunks(ids, size)]
    assert_close(torch.cat(rows), oracle.logits(ids))


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_page_edges(engineless: Engineless, oracle: Oracle, ids: list[int], length: int) -> None:
    """A prompt that ends at an edge, then one token more."""
    engineless.admit(1, length + 1)
    prompt = engineless.extend([Extend(1, 0, tuple(ids[:length]), None)])
    extra = engineless.extend([Extend(1, length, (ids[length],), None)])
    assert_close(torch.cat((prompt, extra)), oracle.logits(ids[: length + 1]))


def test_mixed_batches(engineless: Engineless, oracle: Oracle, ids: list[int]) -> None:
    """Four requests of different lengths and chunk sizes share every iteration, on interleaved pages."""
    prompts = {1: ids[:150], 2: ids[40:140], 3: ids[100:171], 4: list(reversed(ids))[:90]}
    sizes = {1: 13, 2: 7, 3: 17, 4: 1}
    for row, prompt in prompts.items():
        engineless.admit(row, len(prompt))
    streams = {row: chunks(prompt, sizes[row], row) for row, prompt in prompts.items()}
    logits: dict[int, list[Tensor]] = {row: [] for row in prompts}
    while streams:
        batch = [(row, chunk) for row, stream in list(streams.items()) if (chunk := next(stream, None)) is not None]
        for row in set(streams) - {row for row, _ in batch}:
            del streams[row]
        if batch:
            parts = engineless.extend([chunk for _, chunk in batch]).split([len(chunk.tokens) for _, chunk in batch])
            for (row, _), part in zip(batch, parts, strict=True):
                logits[row].append(part)
    for row, prompt in prompts.items():
        assert_close(torch.cat(logits[row]), oracle.logits(prompt))


def test_half_split_indexer_rope_fails_past_index_topk(
    loaded: tuple[ModelSpec, GlmWeights], oracle: Oracle, ids: list[int]
) -> None:
    """The negative control: the wrong rotary layout in the indexer is invisible below `index_topk` and plain beyond it."""
    spec, weights = loaded
    wrong = Engineless(replace(spec, index_rope_interleaved=False), weights)
    wrong.admit(1, LENGTH)
    error = (wrong.extend([Extend(1, 0, tuple(ids), None)]) - oracle.logits(ids)).abs().amax(-1)
    assert error[: spec.index_topk].max().item() <= TOLERANCE
    assert error[spec.index_topk :].max().item() > 0.1
