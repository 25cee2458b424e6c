"""Penalties, bias and bans over a verify window, without a model: each row against the exact distribution, with a control."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from legato.config import Config, resolve
from legato.plan import Admit, Controls
from legato.runtime.batch import Samplers
from legato.runtime.controls import ControlTable
from legato.runtime.draw import ControlledDraw, choose_general, choose_greedy
from legato.runtime.rows import Rows

COUNT, WIDTH, VOCAB = 3000, 4, 12
STOP = 7
DRAFTS = [2, 3, 2]
PROMPT, GENERATED = (0, 1, 1), (3, 5, 5)
LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, 0.9, 0.0, 1.1, -2.0, 0.4, 0.4])
OFF = Controls(PROMPT, GENERATED, 0.0, 0.0, 1.0, 0, (), None, None)
KINDS = {
    "presence": replace(OFF, presence=1.2),
    "frequency": replace(OFF, frequency=0.7),
    "repetition": replace(OFF, repetition=1.6),
    "all three": replace(OFF, presence=-0.4, frequency=0.5, repetition=0.8),
    "bias": replace(OFF, bias=((4, 2.5), (0, -1.5))),
    "ban": replace(OFF, bias=((0, -math.inf), (3, -math.inf))),
    "allowed": replace(OFF, allowed=(0, 3, 9, STOP)),
    "min_tokens": replace(OFF, min_length=12),
    "everything": replace(
        OFF, presence=0.5, frequency=0.3, repetition=1.3, min_length=11, bias=((8, 1.0), (2, -math.inf)),
        allowed=(1, 2, 3, 7, 8, 9)
    ),
}  # fmt: skip


def rows_of(count: int, temperature: float = 1.0) -> Rows:
    """Device rows 1..count of one prompt and one set of parameters, each with its own seed."""
    settings = resolve(Config(), max_position=64, has_mtp=True, cuda_available=False)
    rows = Rows.allocate(replace(settings, max_running=count))
    rows.temperature[:] = temperature
    rows.stop_ids[:, 0] = STOP
    rows.seed[:] = torch.arange(count + 1)
    return rows


def admit(row: int, controls: Controls | None) -> Admit:
    return Admit(row, (1,), 60, (STOP,), 1.0, 0, 1.0, 0.0, row, -1, controls=controls)


def samplers_of(rows: Tensor, drafts: list[int]) -> Samplers:
    count = len(rows)
    nothing = torch.zeros(0, dtype=torch.int64)
    return Samplers(
        rows=rows,
        base=torch.full((count,), 8),
        num_drafts=torch.full((count,), len(drafts)),
        drafts=torch.tensor(drafts).expand(count, -1),
        row_index=torch.zeros(count, len(drafts) + 1, dtype=torch.int64),
        sampler_of=nothing,
        offset=nothing,
    )


def expected(controls: Controls, supposed: list[int], position: int) -> list[float]:
    """The exact distribution at one row, in float64 and in plain words."""
    generated = [*controls.generated, *supposed]
    scores: list[float] = []
    for token, logit in enumerate(LOGITS.double().tolist()):
        times = generated.count(token)
        if times or token in controls.prompt:
            logit = logit / controls.repetition if logit > 0 else logit * controls.repetition
        logit -= controls.frequency * times + controls.presence * (times > 0)
        logit += dict(controls.bias).get(token, 0.0)
        if controls.allowed is not None and token not in controls.allowed:
            logit = -math.inf
        if token == STOP and position < controls.min_length:
            logit = -math.inf
        scores.append(math.exp(logit))
    return [score / sum(scores) for score in scores]


def chi_square(tokens: Tensor, shares: list[float]) -> tuple[float, float]:
    """-> (statistic, what it exceeds once in about three million draws: Wilson and Hilferty, z = 5)."""
    counts = torch.bincount(tokens, minlength=VOCAB).tolist()
    assert not any(count for count, share in zip(counts, shares, strict=True) if share == 0), "an impossible token"
    pairs = [(count, share * len(tokens)) for count, share in zip(counts, shares, strict=True) if share > 0]
    freedom = max(1, len(pairs) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((count - mean) ** 2 / mean for count, mean in pairs), limit


def verified(controls: Controls) -> Tensor:
    rows = rows_of(COUNT)
    table = ControlTable(rows, VOCAB)
    for row in range(1, COUNT + 1):
        table.admit(admit(row, controls))
    draw = ControlledDraw(choose_general, table, {})
    samplers = samplers_of(torch.arange(1, COUNT + 1), DRAFTS)
    return draw.verify(LOGITS.expand(COUNT * WIDTH, -1), rows, samplers)


@pytest.mark.parametrize("name", list(KINDS))
def test_every_row_of_the_window_has_its_exact_distribution(name: str) -> None:
    sampled = verified(KINDS[name])
    for offset in range(WIDTH):
        shares = expected(KINDS[name], DRAFTS[:offset], 9 + offset)
        statistic, limit = chi_square(sampled[:, offset], shares)
        assert statistic < limit, f"row {offset}"


def test_ignoring_drafts_of_the_same_iteration_is_seen() -> None:
    """The negative control: counts that leave out drafts 0..r-1 are wrong at the later rows, and it shows."""
    controls = replace(OFF, frequency=1.5)
    sampled = verified(controls)
    statistic, limit = chi_square(sampled[:, 3], expected(controls, [], 12))
    assert statistic > limit


def test_counts_follow_what_is_emitted_and_rows_start_anew() -> None:
    rows = rows_of(3, 0.0)
    table = ControlTable(rows, VOCAB)
    table.admit(admit(1, replace(OFF, frequency=1.0)))
    table.admit(admit(2, replace(OFF, frequency=1.0, generated=(5,), bias=((2, 4.0),))))
    sampled = torch.tensor([[3, 3, 9, 9], [4, 4, 4, 4], [1, 1, 1, 1]])
    table.record(torch.tensor([1, 2, 3]), sampled, torch.tensor([3, 1, 0]))

    def apply(row: int, supposed: list[int]) -> Tensor:
        return table.apply(torch.zeros(1, VOCAB), torch.tensor([row]), torch.tensor([9]), torch.tensor([supposed]))[0]

    assert apply(1, []).tolist() == [0, 0, 0, -3, 0, -2, 0, 0, 0, -1, 0, 0]
    assert apply(1, [4, -1, 4]).tolist() == [0, 0, 0, -3, -2, -2, 0, 0, 0, -1, 0, 0]
    assert apply(2, []).tolist() == [0, 0, 4, 0, -1, -1, 0, 0, 0, 0, 0, 0]
    assert not apply(3, []).any()
    table.admit(admit(2, None))
    assert not table.holds(2) and not apply(2, []).any()
    table.admit(admit(1, replace(OFF, presence=0.5, generated=())))
    assert not apply(1, []).any()


def test_nothing_is_allocated_before_it_is_asked_for() -> None:
    table = ControlTable(rows_of(2), VOCAB)
    table.admit(admit(1, None))
    table.admit(admit(2, replace(OFF, min_length=20)))
    assert table._bias is None and table._generated is None and table._in_prompt is None


def test_where_nothing_is_left_the_model_decides() -> None:
    rows = rows_of(1, 0.0)
    table = ControlTable(rows, VOCAB)
    table.admit(admit(1, replace(OFF, allowed=(STOP,), min_length=100)))
    draw = ControlledDraw(choose_greedy, table, {})
    samplers = samplers_of(torch.tensor([1]), [])
    assert draw.verify(LOGITS[None], rows, samplers).tolist() == [[0]]


def test_equal_logits_after_controls_go_to_the_lowest_id() -> None:
    rows = rows_of(1, 0.0)
    table = ControlTable(rows, VOCAB)
    table.admit(admit(1, replace(OFF, bias=((0, -0.5),))))
    draw = ControlledDraw(choose_greedy, table, {})
    assert draw.verify(LOGITS[None], rows, samplers_of(torch.tensor([1]), [])).tolist() == [[0]]
