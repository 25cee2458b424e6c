"""Identical tokens: whatever K, the batch mates, the chunk size, the overlap or the drafts. On the CPU without exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from legato.types import SamplingParams
from tests.engine.conftest import Shipped, requests, run

if TYPE_CHECKING:
    from legato.engine.loop import Engine

LENGTH = 24
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
WARM = SamplingParams(max_tokens=LENGTH, temperature=0.8, top_p=0.95, top_k=200, ignore_eos=True)


@pytest.fixture(scope="module", params=[GREEDY, WARM], ids=["greedy", "sampled"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return request.param


@pytest.fixture(scope="module")
def plain(shipped: Shipped, prompts: list[tuple[int, ...]], params: SamplingParams) -> list[list[int]]:
    """Without drafts, one request at a time, prompts in one piece."""
    engine = shipped.engine(num_drafts=0, chunk_tokens=512)
    return [run(engine, [request])[0] for request in requests(prompts, params)]


@pytest.mark.parametrize("num_drafts", [1, 3, 5, 7])
def test_drafts_change_nothing(
    shipped: Shipped, prompts: list[tuple[int, ...]], params: SamplingParams, plain: list[list[int]], num_drafts: int
) -> None:
    """All ten requests in one batch, so batch mates change nothing either."""
    assert run(shipped.engine(num_drafts=num_drafts), requests(prompts, params)) == plain


@pytest.mark.parametrize("chunk", [1, 7, 64, 65])
def test_chunks_change_nothing(
    shipped: Shipped, prompts: list[tuple[int, ...]], params: SamplingParams, plain: list[list[int]], chunk: int
) -> None:
    """Chunks of one row and of odd sizes, interleaved with running requests."""
    some = slice(0, 5) if chunk == 1 else slice(2, 10, 3)
    engine = shipped.engine(chunk_tokens=chunk, num_drafts=2)
    tokens = run(engine, requests(prompts, params)[some])
    assert tokens == plain[some]


def test_overlap_changes_nothing(
    shipped: Shipped, prompts: list[tuple[int, ...]], params: SamplingParams, plain: list[list[int]]
) -> None:
    engine = shipped.engine(overlap=True, max_running=3)
    assert run(engine, requests(prompts, params)) == plain


def test_a_request_alone_and_in_a_crowd(
    shipped: Shipped, prompts: list[tuple[int, ...]], params: SamplingParams, plain: list[list[int]]
) -> None:
    """Requests that come and go beside it do not change it."""
    engine = shipped.engine(num_drafts=5, max_running=2, chunk_tokens=16)
    order = [9, 0, 7, 3]
    batch = requests(prompts, params)
    assert run(engine, [batch[n] for n in order]) == [plain[n] for n in order]


def _overwrite_drafts(engine: Engine, depth: int, vocab: int) -> Callable[[], None]:
    """Before every turn, makes the draft at `depth` of every row one that no target would choose next: rejection there."""
    rows = engine.runner.rows

    def overwrite() -> None:
        rows.tokens[:, depth + 1 :] = (rows.tokens[:, depth + 1 :] + 4242) % vocab

    return overwrite


@pytest.mark.parametrize("depth", range(5))
def test_rejection_at_every_depth(
    shipped: Shipped, prompts: list[tuple[int, ...]], params: SamplingParams, plain: list[list[int]], depth: int
) -> None:
    engine = shipped.engine(num_drafts=5)
    some = slice(depth, None, 4)
    tokens = run(engine, requests(prompts, params)[some], _overwrite_drafts(engine, depth, shipped.spec.vocab_size))
    assert tokens == plain[some]
    assert sum(engine.stats.accepted_at[: depth + 1]) > 0.9 * sum(engine.stats.accepted_at)


def test_garbage_behind_the_length_changes_nothing(
    shipped: Shipped, prompts: list[tuple[int, ...]], params: SamplingParams, plain: list[list[int]]
) -> None:
    """Before every turn all cache slots past each row's length are filled with NaN: what rejected rows left is never read."""
    engine = shipped.engine(num_drafts=5)
    rows, caches = engine.runner.rows, engine.runner.iteration.caches

    def poison() -> None:
        for row in range(1, 11):
            if bool(rows.done[row]) or not int(rows.lengths[row]):
                continue
            length = int(rows.lengths[row])
            pages = rows.page_table[row].tolist()
            for position in range(length, length + 8):
                page, offset = pages[position // 64], position % 64
                for number, cache in enumerate(caches):
                    cache.latent[page, offset] = torch.nan
                    if cache.index is not None and number < len(caches):
                        cache.index[page, offset * 128 : (offset + 1) * 128] = 0x7F  # NaN in e4m3
                        cache.index[page, 8192 + offset * 4 : 8192 + offset * 4 + 4] = 0xFF

    assert run(engine, requests(prompts[:6], params), poison) == plain[:6]


@pytest.mark.full
def test_a_hundred_prompts_of_256_tokens(shipped: Shipped, held_out: list[tuple[int, ...]]) -> None:
    text = [token for prompt in held_out for token in prompt]
    prompts = [tuple(text[n * 17 % 1500 :][: 3 + n * 5]) for n in range(100)]
    batch = requests(prompts, SamplingParams(max_tokens=256, temperature=0, ignore_eos=True))
    plain = run(shipped.engine(num_drafts=0), batch)
    for num_drafts in (1, 3, 5, 7):
        assert run(shipped.engine(num_drafts=num_drafts), batch) == plain
