"""Host memory for evicted pages, on the shipped checkpoint: conversations go on with the same tokens and the same drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from legato.engine.loop import Engine
from legato.plan import Offload, Restore
from legato.runtime.host import HostPages
from legato.schedule import Request
from legato.types import SamplingParams
from tests.engine.conftest import Shipped
from tests.engine.test_reuse import answers, poison_free_pages

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95)
TURNS = 3
SMALL = {"max_running": 1, "cache_tokens": 4 * 64, "context": 256}
"""A pool of four pages, of which the running agent needs up to three."""

Said = list[tuple[list[int], tuple[int, ...], int]]


class Agents:
    """Three agents that take turns: each turn repeats the agent's whole conversation and adds a little."""

    def __init__(self, held_out: list[tuple[int, ...]], salt: str = "") -> None:
        text = [token for prompt in held_out for token in prompt]
        self.salt = salt
        self.news = [
            [tuple(text[(9 * n + turn) * 90 :][: 100 if turn == 0 else 20]) for turn in range(TURNS)] for n in range(3)
        ]

    def play(self, engine: Engine, turns: range, texts: list[tuple[int, ...]]) -> Said:
        """Tokens, accepted drafts and cached tokens of every turn, one agent after the other; `texts` grows."""
        said: Said = []
        for turn in turns:
            for agent, news in enumerate(self.news):
                poison_free_pages(engine)
                engine.reset_stats()
                texts[agent] += news[turn]
                params = SAMPLED if agent == 1 else GREEDY
                request = Request(f"{agent}-{turn}", texts[agent], params, (), 7 * agent + turn, cache_salt=self.salt)
                answer = answers(engine, [request])[request.id]
                texts[agent] += tuple(answer.tokens)
                said.append((answer.tokens, engine.stats.accepted_at, answer.cached))
        return said


@pytest.fixture(scope="module")
def expected(shipped: Shipped, held_out: list[tuple[int, ...]]) -> Said:
    """The same conversations with nothing cached at all."""
    return Agents(held_out).play(shipped.engine(**SMALL, prefix_cache=False), range(TURNS), [()] * 3)


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
def test_conversations_are_found_again_and_not_one_token_changes(
    shipped: Shipped, held_out: list[tuple[int, ...]], expected: Said, overlap: bool
) -> None:
    warm = shipped.engine(**SMALL, host_tokens=16 * 64, overlap=overlap)
    found = Agents(held_out).play(warm, range(TURNS), [()] * 3)
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    # Everything that a turn repeats is found, but for the page that was not full; the device alone could not hold it.
    repeated = [100 + 6 + (20 + 6) * (turn - 1) for turn in range(1, TURNS) for _ in range(3)]
    assert [entry[2] for entry in found] == [0] * 3 + [(length - 1) // 64 * 64 for length in repeated]
    assert warm.stats.host_hit_tokens >= 6 * 64 and not warm.stats.host_evicted_pages
    assert warm.stats.host_pages + warm.stats.cached_pages > 4


@pytest.mark.full
def test_little_host_memory_forgets_what_was_used_least_recently(
    shipped: Shipped, held_out: list[tuple[int, ...]], expected: Said
) -> None:
    warm = shipped.engine(**SMALL, host_tokens=2 * 64)
    found = Agents(held_out).play(warm, range(TURNS), [()] * 3)
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert warm.stats.host_evicted_pages > 0 and warm.stats.host_pages <= 2


@pytest.mark.full
def test_neither_a_flush_nor_another_salt_brings_anything_back(
    shipped: Shipped, held_out: list[tuple[int, ...]]
) -> None:
    engine, texts = shipped.engine(**SMALL, host_tokens=16 * 64), [()] * 3
    Agents(held_out).play(engine, range(2), texts)
    others = Agents(held_out, salt="other").play(engine, range(1), [()] * 3)
    assert [entry[2] for entry in others] == [0, 0, 0]
    held, hits = engine.stats.host_pages, engine.stats.host_hit_tokens
    assert held and hits
    assert engine.flush_cache() > held
    assert engine.stats.host_pages == engine.stats.cached_pages == 0
    assert [entry[2] for entry in Agents(held_out).play(engine, range(2, 3), texts)] == [0, 0, 0]
    assert engine.stats.host_hit_tokens == hits


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_preempted_request_comes_back_from_the_host(
    shipped: Shipped, held_out: list[tuple[int, ...]], overlap: bool
) -> None:
    """It is sent back to wait behind one that takes all four pages, and finds its first on the host."""
    text = [token for prompt in held_out for token in prompt]
    small = Request("small", tuple(text[:100]), replace(GREEDY, max_tokens=20), (), 0)
    large = Request("large", tuple(text[200:400]), replace(GREEDY, max_tokens=2), (), 0, priority=1)
    tokens: list[list[int]] = []
    for is_disturbed in (False, True):
        engine = shipped.engine(**SMALL, host_tokens=8 * 64, overlap=overlap)
        engine.submit(small)
        tokens.append([])
        turns = 0
        while engine.has_work:
            turns += 1
            if is_disturbed and turns == 3:
                engine.submit(large)
                engine.preempt("small")
            for progress in engine.turn():
                tokens[-1] += progress.tokens if progress.request_id == "small" else ()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 20
    assert engine.stats.preemptions == 1 and engine.stats.host_hit_tokens == 64


def test_moves_are_as_if_one_after_the_other(shipped: Shipped) -> None:
    """A slot and a page that several moves use: each sees what the one before it left."""
    engine = shipped.engine(cache_tokens=6 * 64, host_tokens=2 * 64)
    caches = engine.runner.iteration.caches
    tensors = [tensor for cache in caches for tensor in (cache.latent, cache.index) if tensor is not None]
    assert len(caches) == shipped.spec.num_layers + 1, "the draft layer's cache goes with the others"
    bytes_of = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
    for part in bytes_of:
        part.random_(0, 256)
    before = [part.clone() for part in bytes_of]
    host = HostPages(caches, 2)
    assert host.page_bytes == sum(part.shape[1] for part in bytes_of)
    host.move(
        (
            Offload(1, 1),
            Offload(2, 2),
            Restore(1, 2),
            Offload(3, 1),
            Restore(1, 1),
            Restore(2, 3),
            Offload(2, 2),
            Restore(2, 4),
        )
    )
    for part, old in zip(bytes_of, before, strict=True):
        assert [
            int((part[page] != old[was]).sum()) for page, was in ((1, 3), (2, 1), (3, 2), (4, 1), (5, 5), (6, 6))
        ] == [0] * 6
