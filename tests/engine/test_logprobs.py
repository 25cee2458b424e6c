"""Log-probabilities: the model's own, of prompts and of what follows, the same with and without drafts and in any chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from legato.engine.loop import Engine
from legato.llm import LLM
from legato.plan import Admit, Extend, Plan
from legato.runtime.batch import build_batch
from legato.schedule import Request
from legato.types import SamplingParams, TokenLogprob
from tests.engine.conftest import Shipped

PARAMS = SamplingParams(
    max_tokens=12, temperature=1.0, logprobs=5, prompt_logprobs=3, ignore_eos=True, presence_penalty=0.8,
    logit_bias={198: -100}, top_k=1,
)  # fmt: skip
Result = tuple[list[int], list[TokenLogprob], dict[int, TokenLogprob]]


def collect(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[Result]:
    """Tokens, their log-probabilities, and the prompts' by position."""
    results: dict[str, Result] = {f"r{n}": ([], [], {}) for n in range(len(prompts))}
    for name, prompt in zip(results, prompts, strict=True):
        engine.submit(Request(name, prompt, PARAMS, (), 5))
    while engine.has_work:
        for progress in engine.turn():
            tokens, logprobs, of_prompt = results[progress.request_id]
            tokens += progress.tokens
            logprobs += progress.logprobs or ()
            if progress.prompt_logprobs is not None:
                for at, entry in enumerate(progress.prompt_logprobs.logprobs, progress.prompt_logprobs.start):
                    assert at not in of_prompt, "a prompt token twice"
                    of_prompt[at] = entry
    return list(results.values())


@pytest.fixture(scope="module")
def some(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [prompts[0], prompts[4], prompts[5]]


@pytest.fixture(scope="module")
def plain(shipped: Shipped, some: list[tuple[int, ...]]) -> list[Result]:
    return collect(shipped.engine(num_drafts=0, chunk_tokens=512, max_running=1), some)


@pytest.mark.parametrize(("num_drafts", "chunk"), [(5, 512), (5, 7), (3, 64), (0, 65)])
def test_drafts_and_chunks_change_nothing(
    shipped: Shipped, some: list[tuple[int, ...]], plain: list[Result], num_drafts: int, chunk: int
) -> None:
    assert collect(shipped.engine(num_drafts=num_drafts, chunk_tokens=chunk, overlap=chunk == 64), some) == plain


@torch.inference_mode()
def test_against_the_model(shipped: Shipped, some: list[tuple[int, ...]], plain: list[Result]) -> None:
    """Every value is the model's own, in float64, over the whole text at once; so are the rivals, best first."""
    runner = shipped.engine(num_drafts=0).runner
    for prompt, (tokens, logprobs, of_prompt) in zip(some, plain, strict=True):
        text = [*prompt, *tokens]
        assert sorted(of_prompt) == list(range(1, len(prompt))) and len(logprobs) == len(tokens)
        runner.rows.admit(Admit(1, tuple(range(1, 9)), 512, (), 0.0, 0, 1.0, 0.0, 0, -1))
        batch = build_batch(Plan(0, (), (Extend(1, 0, tuple(text), 0),), ()), runner.rows, runner.spec)
        target = runner.iteration.target
        values = target.logits(target.hidden(batch.ids, batch.step, runner.iteration.caches)).double().log_softmax(-1)
        entries = [of_prompt[at] for at in range(1, len(prompt))] + logprobs
        for at, entry in enumerate(entries):
            assert entry.token_id == text[at + 1]
            assert abs(entry.logprob - float(values[at, entry.token_id])) < 1e-4
            assert len(entry.top) == (3 if at + 1 < len(prompt) else 5)
            best = values[at].topk(len(entry.top)).values.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-4)
            assert math.isfinite(entry.logprob)


def test_completion_has_one_entry_per_prompt_token(llm: LLM) -> None:
    completion = llm.generate("def f(x):\n", SamplingParams(max_tokens=2, seed=1, prompt_logprobs=0))[0]
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == completion.prompt_tokens and completion.prompt_logprobs[0] is None
    assert all(entry is not None for entry in completion.prompt_logprobs[1:])
