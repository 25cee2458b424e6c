"""Prefix cache and preemption on the shipped checkpoint: not one token, log-probability or accepted draft changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from legato.engine.loop import Engine
from legato.schedule import Request
from legato.types import SamplingParams, TokenLogprob
from tests.engine.conftest import Shipped, run

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95)
CUTS = {63: 0, 64: 0, 65: 64, 127: 64, 128: 64, 129: 128}
"""Common tokens of two prompts, and how many of them are found: a page also needs the token after it."""


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    ends: int = 0


def answers(engine: Engine, batch: Sequence[Request], preempt_every: int = 0) -> dict[str, Answer]:
    """Everything that requests gained, run together; every so many turns each of them is preempted."""
    gained = {request.id: Answer() for request in batch}
    for request in batch:
        engine.submit(request)
    turns = 0
    while engine.has_work:
        turns += 1
        if preempt_every and turns % preempt_every == 0:
            for request in batch:
                engine.preempt(request.id)
        for progress in engine.turn():
            answer = gained[progress.request_id]
            answer.tokens += progress.tokens
            answer.logprobs += progress.logprobs or ()
            answer.cached = progress.cached_tokens
            answer.ends += progress.finish_reason is not None
    return gained


def poison_free_pages(engine: Engine) -> None:
    """Fills every page that is not cached with NaN, the dummy page too: nothing of them may be read before it is written."""
    cached = set(engine._scheduler.pages.pool._granted)
    free = torch.tensor([page for page in range(engine.runner.settings.num_pages) if page not in cached])
    for cache in engine.runner.iteration.caches:
        cache.latent[free] = torch.nan
        if cache.index is not None:
            cache.index[free] = torch.nan if cache.index.dtype.is_floating_point else 0x7F


def siblings(stem: tuple[int, ...], vocab: int) -> list[Request]:
    """The stem again, then prompts that leave it after so many tokens: each differs in the one token there."""
    prompts = {"same": stem}
    for cut in CUTS:
        other = (stem[cut] + 4242) % vocab if cut < len(stem) else 11
        prompts[f"after {cut}"] = (*stem[:cut], other, *stem[5:12])
    return [
        Request(name, prompt, SAMPLED if place % 2 else GREEDY, (), place)
        for place, (name, prompt) in enumerate(prompts.items())
    ]


@pytest.mark.full
@pytest.mark.parametrize("chunk", [50, 512])
def test_a_hit_changes_neither_tokens_nor_accept_length(
    shipped: Shipped, held_out: list[tuple[int, ...]], chunk: int
) -> None:
    text = [token for prompt in held_out for token in prompt]
    stem = tuple(text[:130])
    cold = shipped.engine(prefix_cache=False, max_running=1, cache_tokens=512)
    warm = shipped.engine(max_running=1, cache_tokens=2048, chunk_tokens=chunk)
    run(warm, [Request("first", stem, replace(GREEDY, max_tokens=2), (), 0)])
    for request in siblings(stem, shipped.spec.vocab_size):
        if request.id == "same" and chunk == 50:
            continue
        found: list[tuple[Answer, tuple[int, ...]]] = []
        poison_free_pages(warm)
        for engine in (cold, warm):
            engine.reset_stats()
            found.append((answers(engine, [request])[request.id], engine.stats.accepted_at))
        (expected, expected_accepts), (answer, accepts) = found
        hit = 128 if request.id == "same" else CUTS[int(request.id.split()[1])]
        assert (answer.cached, expected.cached) == (hit, 0), request.id
        assert answer.tokens == expected.tokens, request.id
        assert accepts == expected_accepts, request.id


def test_generated_text_is_found_too(shipped: Shipped, held_out: list[tuple[int, ...]]) -> None:
    """The second turn of a conversation finds pages that decoding wrote, drafts accepted and rejected."""
    prompt = held_out[0][:50]
    first = Request("first", prompt, replace(SAMPLED, max_tokens=40), (), 3)
    warm = shipped.engine(max_running=1, cache_tokens=1024)
    said = answers(warm, [first])["first"].tokens
    second = Request("second", (*prompt, *said, *held_out[1][:6]), GREEDY, (), 4)
    warm.reset_stats()
    answer = answers(warm, [second])["second"]
    cold = shipped.engine(prefix_cache=False, max_running=1, cache_tokens=1024)
    assert answer.cached == 64
    assert answer.tokens == answers(cold, [second])["second"].tokens
    assert warm.stats.accepted_at == cold.stats.accepted_at


CONTROLLED = replace(SAMPLED, logprobs=2, frequency_penalty=0.6, repetition_penalty=1.2, min_tokens=4, max_tokens=16)


@pytest.fixture(scope="module")
def batch(held_out: list[tuple[int, ...]]) -> list[Request]:
    """A few short prompts with everything that a resumed request must not lose: log-probabilities, counts, bounds."""
    return [Request(f"r{n}", held_out[n][: 9 + 28 * n], CONTROLLED, (), 60 + n) for n in range(3)]


@pytest.fixture(scope="module")
def undisturbed(shipped: Shipped, batch: list[Request]) -> dict[str, Answer]:
    return answers(shipped.engine(cache_tokens=1024), batch)


@pytest.mark.parametrize(
    ("overlap", "prefix_cache", "every"),
    [(True, True, 3), *(pytest.param(*rest, marks=pytest.mark.full) for rest in ((False, True, 2), (True, False, 4)))],
)
def test_preemption_changes_nothing_and_repeats_nothing(
    shipped: Shipped,
    batch: list[Request],
    undisturbed: dict[str, Answer],
    overlap: bool,
    prefix_cache: bool,
    every: int,
) -> None:
    engine = shipped.engine(cache_tokens=1024, overlap=overlap, prefix_cache=prefix_cache)
    disturbed = answers(engine, batch, every)
    assert engine.stats.preemptions >= 6
    assert engine.stats.emitted_tokens == 3 * 16
    for name, answer in undisturbed.items():
        assert answer.ends == disturbed[name].ends == 1
        assert disturbed[name].tokens == answer.tokens
        assert disturbed[name].logprobs == answer.logprobs


@pytest.mark.full
@pytest.mark.parametrize(("overlap", "prefix_cache"), [(False, False), (True, True)])
def test_a_pool_of_little_more_than_one_request(
    shipped: Shipped, held_out: list[tuple[int, ...]], overlap: bool, prefix_cache: bool
) -> None:
    """Each grows to 3 pages, and there are 4: the second makes room for the first, and both texts are the text alone."""
    params = replace(GREEDY, max_tokens=80)
    two = [Request(f"r{n}", held_out[n][:55], params, (), n) for n in range(2)]
    plain = run(shipped.engine(cache_tokens=1024), two)
    engine = shipped.engine(cache_tokens=4 * 64, overlap=overlap, prefix_cache=prefix_cache)
    assert run(engine, two) == plain
    assert engine.stats.preemptions >= 1
    pages = engine._scheduler.pages
    assert pages.num_available == pages.pool.capacity


def test_a_preempted_prompt_reports_its_logprobs_once(shipped: Shipped, held_out: list[tuple[int, ...]]) -> None:
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=1)
    request = Request("r", held_out[0][:70], params, (), 0)
    engine = shipped.engine(cache_tokens=512, chunk_tokens=30)
    run(engine, [replace(request, id="first", params=replace(params, prompt_logprobs=None))])
    places: list[list[int]] = []
    values: list[list[TokenLogprob]] = []
    for preempted in (False, True):
        engine.submit(request)
        places.append([])
        values.append([])
        for turn in range(20):
            if preempted and turn == 2:
                engine.preempt("r")
            for progress in engine.turn():
                if (some := progress.prompt_logprobs) is not None:
                    places[-1] += range(some.start, some.start + len(some.logprobs))
                    values[-1] += some.logprobs
        assert not engine.has_work
    assert engine.stats.preemptions == 1
    assert places == [list(range(1, 70))] * 2
    assert values[0] == values[1]


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.full), True])
def test_one_that_waits_for_a_page_goes_on_where_it_stood(
    shipped: Shipped, held_out: list[tuple[int, ...]], overlap: bool
) -> None:
    """Two requests need two pages each, and there are three: the second stops at its 64th token until the first has ended."""
    two = [Request(f"r{n}", held_out[n][:56], replace(GREEDY, max_tokens=18), (), n) for n in range(2)]
    plain = run(shipped.engine(cache_tokens=1024), two)
    engine = shipped.engine(cache_tokens=3 * 64, overlap=overlap)
    stood = 0

    def look() -> None:
        nonlocal stood
        rows = engine.runner.rows
        stood += int(((rows.lengths == 64) & (rows.capacity == 64) & ~rows.done).sum())

    assert run(engine, two, look) == plain
    assert stood and engine.stats.preemptions == 0
