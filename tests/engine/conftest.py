"""The shipped checkpoint, loaded once, and engines of any settings around its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from legato.checkpoints import HELD_OUT, SMALL
from legato.config import CacheConfig, Config, Resolved, resolve
from legato.engine.loop import Engine
from legato.engine.start import build_engine
from legato.llm import LLM
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.spec import ModelSpec
from legato.model.weights import GlmWeights, Residency, load_weights
from legato.schedule import Request
from legato.server.text.tokenizer import Tokenizer
from legato.types import SamplingParams

SMALL_CACHE = CacheConfig(tokens=8192)


class Shipped:
    """The shipped checkpoint's shapes, weights and tokenizer."""

    def __init__(self) -> None:
        checkpoint = Checkpoint.open(SMALL)
        self.spec: ModelSpec = stored_spec(checkpoint)
        self.weights: GlmWeights = load_weights(
            checkpoint, self.spec, device="cpu", dtype=torch.float32, resident=Residency.DENSE
        )
        self.tokenizer = Tokenizer.open(checkpoint.source)

    def settings(self, **changes: Any) -> Resolved:
        """The defaults, but a cache of 8192 tokens: to fill one of 64 Ki with zeros takes longer than many a test."""
        config = Config(cache=SMALL_CACHE)
        resolved = resolve(config, max_position=self.spec.max_position, has_mtp=True, cuda_available=False)
        return replace(resolved, **changes)

    def engine(self, **changes: Any) -> Engine:
        return build_engine(self.spec, self.weights, self.settings(**changes))


@pytest.fixture(scope="session")
def shipped() -> Shipped:
    return Shipped()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The shipped checkpoint as a user has it, with five drafts; what one test leaves in it is prefixes in its cache."""
    return LLM(config=Config(cache=SMALL_CACHE), num_drafts=5)


@pytest.fixture(scope="session")
def held_out(shipped: Shipped) -> list[tuple[int, ...]]:
    """Real prompts that the checkpoint has not seen, as token ids; together at least 2,500 tokens."""
    lines = HELD_OUT.read_bytes().splitlines()
    return [tuple(shipped.tokenizer.encode_prompt(msgspec.json.decode(line)["text"])) for line in lines]


@pytest.fixture(scope="session")
def prompts(held_out: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Ten prompts of real text whose lengths lie at page edges and on both sides of `index_topk` (256)."""
    text = [token for prompt in held_out for token in prompt]
    lengths = (5, 62, 63, 64, 65, 127, 200, 250, 256, 300)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return [tuple(text[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(
    scope="module", params=[pytest.param(0.0, id="greedy", marks=pytest.mark.full), pytest.param(1.0, id="sampled")]
)
def temperature(request: pytest.FixtureRequest) -> float:
    """Both kinds of sampling; modules run their batches once for each."""
    return request.param


def requests(
    prompts: Sequence[tuple[int, ...]], params: SamplingParams, stop_ids: tuple[int, ...] = ()
) -> list[Request]:
    return [Request(f"r{n}", prompt, params, stop_ids, 1000 + n) for n, prompt in enumerate(prompts)]


def run(engine: Engine, batch: Sequence[Request], before_turn: Callable[[], None] | None = None) -> list[list[int]]:
    """The tokens of every request, run together."""
    tokens: dict[str, list[int]] = {request.id: [] for request in batch}
    for request in batch:
        engine.submit(request)
    while engine.has_work:
        if before_turn is not None:
            before_turn()
        for progress in engine.turn():
            tokens[progress.request_id] += progress.tokens
    return list(tokens.values())


def by_name(engine: Engine, batch: Sequence[Request]) -> dict[str, list[int]]:
    """The same, by the requests' ids."""
    return dict(zip((request.id for request in batch), run(engine, batch), strict=True))
