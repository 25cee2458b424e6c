"""Identical tokens: whatever K, the batch mates, the chunk size, the overlap or the drafts. On the CPU without exception."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from legato.config import PAGE_SIZE
from legato.schedule import Request
from legato.types import SamplingParams
from tests.engine.conftest import Shipped, requests, run

LENGTH = 20
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
WARM = SamplingParams(max_tokens=LENGTH, temperature=0.8, top_p=0.95, top_k=200, ignore_eos=True)


@dataclass(frozen=True)
class Truth:
    """Requests and the tokens they give without drafts, one at a time, prompts in one piece."""

    batch: list[Request]
    tokens: list[list[int]]

    @classmethod
    def of(cls, shipped: Shipped, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Truth:
        engine = shipped.engine(num_drafts=0, chunk_tokens=512)
        batch = requests(prompts, params)
        return cls(batch, [run(engine, [request])[0] for request in batch])

    def pick(self, *numbers: int) -> Truth:
        return Truth([self.batch[n] for n in numbers], [self.tokens[n] for n in numbers])


@pytest.fixture(scope="module")
def greedy(shipped: Shipped, prompts: list[tuple[int, ...]]) -> Truth:
    """All ten prompts."""
    return Truth.of(shipped, prompts, GREEDY)


@pytest.fixture(scope="module")
def sampled(shipped: Shipped, prompts: list[tuple[int, ...]]) -> Truth:
    """A short prompt, one at a page edge, one at `index_topk`."""
    return Truth.of(shipped, [prompts[0], prompts[3], prompts[8]], WARM)


@pytest.mark.parametrize(
    ("num_drafts", "some"),
    [(1, (1, 4, 5)), pytest.param(3, range(10), marks=pytest.mark.full), (5, range(10)), (7, (0, 3, 7, 8))],
)
def test_drafts_change_nothing(shipped: Shipped, greedy: Truth, num_drafts: int, some: Sequence[int]) -> None:
    """Requests in one batch, with five drafts all ten, so batch mates change nothing either."""
    truth = greedy.pick(*some)
    assert run(shipped.engine(num_drafts=num_drafts), truth.batch) == truth.tokens


@pytest.mark.parametrize("num_drafts", [2, pytest.param(5, marks=pytest.mark.full)])
def test_drafts_change_no_sample(shipped: Shipped, sampled: Truth, num_drafts: int) -> None:
    assert run(shipped.engine(num_drafts=num_drafts), sampled.batch) == sampled.tokens


@pytest.mark.parametrize(
    ("chunk", "some"),
    [
        pytest.param(1, (0, 1), marks=pytest.mark.full),
        (7, (2, 5)),
        pytest.param(64, (4, 9), marks=pytest.mark.full),
        (65, (3, 9)),
    ],
)
def test_chunks_change_nothing(shipped: Shipped, greedy: Truth, chunk: int, some: tuple[int, ...]) -> None:
    """Chunks of one row and of odd sizes, interleaved with running requests."""
    truth = greedy.pick(*some)
    assert run(shipped.engine(chunk_tokens=chunk, num_drafts=2), truth.batch) == truth.tokens


def test_overlap_changes_nothing(shipped: Shipped, greedy: Truth, sampled: Truth) -> None:
    """Greedy and sampled requests together, three at a time."""
    engine = shipped.engine(overlap=True, max_running=3)
    renamed = [replace(request, id=f"warm-{request.id}") for request in sampled.batch]
    truth = greedy.pick(0, 4, 6)
    assert run(engine, truth.batch + renamed) == truth.tokens + sampled.tokens


def test_a_request_alone_and_in_a_crowd(shipped: Shipped, greedy: Truth) -> None:
    """Requests that come and go beside it do not change it."""
    truth = greedy.pick(6, 0, 5, 3)
    assert run(shipped.engine(num_drafts=5, max_running=2, chunk_tokens=16), truth.batch) == truth.tokens


def test_rejection_at_every_depth(shipped: Shipped, greedy: Truth) -> None:
    """Five requests in one batch. Before every turn the draft of the n-th row at depth n is made one that no target would choose
    next, so each is rejected at a depth of its own."""
    engine, truth = shipped.engine(num_drafts=5), greedy.pick(0, 1, 4, 5, 7)
    rows = engine.runner.rows
    accepted: list[list[int]] = [[] for _ in truth.batch]

    def overwrite() -> None:
        for depth in range(5):
            rows.tokens[1 + depth, depth + 1 :] = (rows.tokens[1 + depth, depth + 1 :] + 4242) % shipped.spec.vocab_size

    for request in truth.batch:
        engine.submit(request)
    tokens: list[list[int]] = [[] for _ in truth.batch]
    numbers = {request.id: number for number, request in enumerate(truth.batch)}
    while engine.has_work:
        overwrite()
        for progress in engine.turn():
            number = numbers[progress.request_id]
            tokens[number] += progress.tokens
            accepted[number] += [progress.accepted] if progress.drafted else []
    assert tokens == truth.tokens
    for depth, counts in enumerate(accepted):
        assert len(counts) > 1 and sum(count <= depth for count in counts) > 0.9 * len(counts), (
            f"depth {depth}: {counts}"
        )
    assert all(depth in counts for depth, counts in enumerate(accepted)), f"not at every depth: {accepted}"


def test_garbage_behind_the_length_changes_nothing(shipped: Shipped, greedy: Truth) -> None:
    """Before every turn the cache slots past each row's length are filled with NaN: what rejected rows left is never read."""
    engine = shipped.engine(num_drafts=5)
    rows, caches = engine.runner.rows, engine.runner.iteration.caches

    def poison() -> None:
        for row in range(1, rows.done.shape[0]):
            length = int(rows.lengths[row])
            if bool(rows.done[row]) or not length:
                continue
            pages = rows.page_table[row].tolist()
            for position in range(length, length + 8):
                page, offset = pages[position // PAGE_SIZE], position % PAGE_SIZE
                for cache in caches if page else ():
                    cache.latent[page, offset] = torch.nan
                    if cache.index is not None:
                        cache.index[page, offset * 128 : (offset + 1) * 128] = 0x7F  # NaN in e4m3
                        cache.index[page, 8192 + offset * 4 : 8196 + offset * 4] = 0xFF  # and in float32

    truth = greedy.pick(1, 3, 5)
    assert run(engine, truth.batch, poison) == truth.tokens


@pytest.mark.full
def test_a_hundred_prompts_of_256_tokens(shipped: Shipped, held_out: list[tuple[int, ...]]) -> None:
    text = [token for prompt in held_out for token in prompt]
    prompts = [tuple(text[n * 17 % 1500 :][: 3 + n * 5]) for n in range(100)]
    batch = requests(prompts, SamplingParams(max_tokens=256, temperature=0, ignore_eos=True))
    room = 16 * 1024
    plain = run(shipped.engine(num_drafts=0, cache_tokens=room), batch)
    for num_drafts in (1, 3, 5, 7):
        assert run(shipped.engine(num_drafts=num_drafts, cache_tokens=room), batch) == plain
