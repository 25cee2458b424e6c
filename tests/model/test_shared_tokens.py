"""Rows of a prompt that share tokens attend as they would alone, and do so where that takes less time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.checkpoints import SMALL
from legato.model import attention as attention_module
from legato.model.attention import attention
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.reader import Residency
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Prompt, Selection, Step
from legato.model.weights import GlmWeights, load_weights
from legato.ops import rope_angles
from legato.ops.attend.masked import WIDTHS, sharing_pays

MEASURED = Path(__file__).parents[2] / "records" / "2026-12-01-prompts-of-heads" / "attention.jsonl"
ROWS, CACHED, PAGES = 301, 90, 9


@pytest.fixture(scope="module")
def small() -> tuple[ModelSpec, GlmWeights]:
    checkpoint = Checkpoint.open(SMALL)
    spec = stored_spec(checkpoint)
    return spec, load_weights(checkpoint, spec, device="cpu", dtype=torch.float32, resident=Residency.DENSE)


def step_of(spec: ModelSpec) -> Step:
    """The last rows of a request whose pages lie anywhere."""
    pages = torch.tensor([5, 2, 7, 0, 8, 3, 6])
    length = CACHED + ROWS
    tokens = (pages[:, None] * 64 + torch.arange(64)).view(-1)[:length].to(torch.int32)
    positions = torch.arange(CACHED, length)
    cos, sin = rope_angles(positions, spec.rope_theta, spec.rope_dim)
    return Step(
        positions, torch.zeros(ROWS, dtype=torch.int32), pages[None].to(torch.int32), (positions + 1).to(torch.int32),
        tokens[CACHED:], cos, sin, prompt=Prompt(tokens, pages),
    )  # fmt: skip


def test_a_layer_gives_the_same_with_keys_of_its_heads(
    small: tuple[ModelSpec, GlmWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with an indexer and the one behind it; rows that are no whole places, and see more tokens than they select."""
    spec, weights = small
    assert spec.index_topk < CACHED + ROWS
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, spec.hidden_size, generator=draw)
    latents = torch.randn(2, PAGES, 64, spec.latent_dim, generator=draw)
    keys = torch.randn(PAGES, 64, spec.index_dim, generator=draw)
    found: dict[bool, list[torch.Tensor]] = {}
    selections: list[Selection] = []
    for shares in (False, True):
        monkeypatch.setattr(attention_module, "_share_tokens", lambda *_, shares=shares: shares)
        step, caches = (
            step_of(spec),
            (LayerCache(latents[0].clone(), keys.clone()), LayerCache(latents[1].clone(), None)),
        )
        first, selection = attention(x, weights.layers[0].attention, caches[0], step, None, spec)
        second, _ = attention(x, weights.layers[1].attention, caches[1], step, selection, spec)
        found[shares] = [first, second, caches[0].latent, caches[1].latent]
        selections.append(selection)
    assert selections[0].together is None and selections[1].together is not None
    assert torch.equal(selections[0].slots, selections[1].slots)
    for alone, together in zip(found[False], found[True], strict=True):
        assert torch.allclose(alone, together, atol=1e-4)


def test_rows_share_tokens_of_one_request_and_of_the_kernel_s_widths(small: tuple[ModelSpec, GlmWeights]) -> None:
    nope, rope, value = WIDTHS
    spec = replace(small[0], nope_dim=nope, rope_dim=rope, v_dim=value)
    blank = torch.zeros(2048)
    step = Step(blank, blank, blank, blank, blank, blank, blank, prompt=Prompt(blank, blank))
    assert attention_module._share_tokens(step, 8, spec)
    assert not attention_module._share_tokens(step, 64, spec)
    assert not attention_module._share_tokens(step, 8, small[0])
    assert not attention_module._share_tokens(replace(step, prompt=None), 8, spec)


def test_rows_share_tokens_where_that_was_faster() -> None:
    """On an H200, in all measured cases, but for 10 % of the time."""
    cases = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    chosen = [sharing_pays(case["rows"], case["length"], case["heads"]) for case in cases]
    assert 5 < sum(chosen) < len(cases) - 5
    for pays, case in zip(chosen, cases, strict=True):
        took, other = (case[form] for form in (("together", "alone") if pays else ("alone", "together")))
        assert took <= 1.1 * other, case
