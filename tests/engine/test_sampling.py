"""Penalties, bias, bans, min_tokens, log-probabilities: on the shipped checkpoint, the same tokens with drafts as without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from legato.engine.loop import Engine
from legato.plan import Admit, Extend, Plan
from legato.runtime.batch import build_batch
from legato.schedule import Request
from legato.types import SamplingParams
from tests.engine.conftest import Shipped, by_name, run

LENGTH = 16
PROMPT = "def parse(self, text):\n    "
STOP = 271
KINDS = {
    "plain": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "repetition": {"repetition_penalty": 1.4},
    "rewards": {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {220: 3.0, 198: -4.0, 262: 14.0}},
    "ban by bias": {"logit_bias": {198: -100, 286: -100, 220: -100}},
    "one token": {"logit_bias": {300: 100}},
    "bad ids": {"bad_token_ids": tuple(range(190, 300))},
    "allowed ids": {"allowed_token_ids": tuple(range(256, 400))},
    "min_tokens": {"min_tokens": 9, "logit_bias": {STOP: 100.0}},
    "min_p": {"min_p": 0.2},
    "top_k 1": {"top_k": 1},
    "top_k 5": {"top_k": 5},
    "everything": {
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {262: 2.0, 198: -100},
        "bad_token_ids": (220,), "min_tokens": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.02,
    },
}  # fmt: skip


def params_of(name: str, temperature: float) -> SamplingParams:
    ignore_eos = "min_tokens" not in KINDS[name]
    return SamplingParams(max_tokens=LENGTH, temperature=temperature, ignore_eos=ignore_eos, **KINDS[name])


def batch_of(shipped: Shipped, temperature: float) -> list[Request]:
    """One request of each kind, all of the same prompt: batch mates with other controls are part of the test."""
    prompt = tuple(shipped.tokenizer.encode_prompt(PROMPT))
    return [Request(name, prompt, params_of(name, temperature), (STOP,), 17) for name in KINDS]


@pytest.fixture(scope="module")
def plain(shipped: Shipped, temperature: float) -> dict[str, list[int]]:
    """Without drafts, in batches of three."""
    return by_name(shipped.engine(num_drafts=0, max_running=3), batch_of(shipped, temperature))


@pytest.fixture(scope="module")
def drafted(shipped: Shipped, temperature: float) -> tuple[Engine, dict[str, list[int]]]:
    """With five drafts, all in one batch, with overlap."""
    engine = shipped.engine(num_drafts=5, overlap=True)
    return engine, by_name(engine, batch_of(shipped, temperature))


@pytest.mark.parametrize("name", list(KINDS))
def test_drafts_change_nothing(
    plain: dict[str, list[int]], drafted: tuple[Engine, dict[str, list[int]]], name: str
) -> None:
    assert drafted[1][name] == plain[name]


def test_drafts_are_accepted_under_controls(drafted: tuple[Engine, dict[str, list[int]]]) -> None:
    """Or the equality above would say nothing."""
    stats = drafted[0].stats
    assert sum(stats.accepted_at[1:]) > 20 and stats.accept_length > 1.3


def test_controls_do_what_they_say(plain: dict[str, list[int]]) -> None:
    for name in ("presence", "frequency", "repetition", "bias", "allowed ids", "everything"):
        assert plain[name] != plain["plain"], name
    assert not {198, 286, 220} & set(plain["ban by bias"])
    assert set(plain["one token"]) == {300}
    assert not set(range(190, 300)) & set(plain["bad ids"])
    assert set(plain["allowed ids"]) <= set(range(256, 400))
    assert plain["min_tokens"][-1] == STOP and len(plain["min_tokens"]) == 10
    assert len(set(plain["presence"])) > len(set(plain["rewards"]))
    assert STOP not in plain["everything"][:5]


def test_other_requests_change_nothing(shipped: Shipped, plain: dict[str, list[int]], temperature: float) -> None:
    """Alone in an engine that has never seen a control, and in a row whose last owner had some."""
    first, *_, last = batch_of(shipped, temperature)
    engine = shipped.engine(num_drafts=3, max_running=1)
    assert run(engine, [first, last, replace(first, id="again")]) == [
        plain["plain"], plain["everything"], plain["plain"]
    ]  # fmt: skip


def test_preemption_changes_nothing(shipped: Shipped, plain: dict[str, list[int]], temperature: float) -> None:
    """Counts, bias and `min_tokens` are as they were when a request resumes, in another row or in its own."""
    names = ("plain", "frequency", "repetition", "min_tokens", "everything")
    batch = [request for request in batch_of(shipped, temperature) if request.id in names]
    engine = shipped.engine(num_drafts=5, max_running=4, overlap=True)
    turns = iter(range(1000))

    def preempt() -> None:
        if next(turns) in (3, 5, 6):
            for name in names:
                engine.preempt(name)

    assert run(engine, batch, preempt) == [plain[name] for name in names]
    assert engine.stats.preemptions >= 8


@torch.inference_mode()
def next_logits(engine: Engine, text: Sequence[int]) -> list[float]:
    """The model's logits behind a text, computed from nothing in a row of their own."""
    runner = engine.runner
    runner.rows.admit(Admit(16, tuple(range(100, 102)), 128, (), 0.0, 0, 1.0, 0.0, 0, -1))
    batch = build_batch(Plan(0, (), (Extend(16, 0, tuple(text), 0),), ()), runner.rows, runner.spec)
    hidden = runner.iteration.target.hidden(batch.ids, batch.step, runner.iteration.caches)
    return runner.iteration.target.logits(hidden[-1:])[0].double().tolist()


@pytest.mark.parametrize(
    "name", ["everything", *(pytest.param(name, marks=pytest.mark.full) for name in ("frequency", "repetition"))]
)
def test_against_the_definition_token_by_token(shipped: Shipped, name: str) -> None:
    """Greedy: each token is the best of logits that plain Python has changed as the documentation says."""
    params = replace(params_of(name, 0.0), max_tokens=10, top_k=0, top_p=1.0, min_p=0.0)
    prompt = shipped.tokenizer.encode_prompt(PROMPT)
    tokens = run(shipped.engine(num_drafts=5), [Request("a", tuple(prompt), params, (STOP,), 1)])[0]
    reference = shipped.engine(num_drafts=0)
    for at, chosen in enumerate(tokens):
        scores = next_logits(reference, [*prompt, *tokens[:at]])
        for token in set(prompt) | set(tokens[:at]):
            value, times = scores[token], tokens[:at].count(token)
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            scores[token] = value - params.frequency_penalty * times - params.presence_penalty * (times > 0)
        for token, bias in params.logit_bias.items():
            scores[token] += -math.inf if bias == -100 else bias
        for token in (*params.bad_token_ids, *([STOP] if at < params.min_tokens else [])):
            scores[token] = -math.inf
        assert scores[chosen] > max(scores) - 1e-5, f"token {at}"
