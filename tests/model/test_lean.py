"""Lean drafts: only what drafts is quantised again, and no token of the target changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.config import Config, resolve
from legato.engine.start import EMBEDDED_CHECKPOINT, build_engine
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.lean import DraftWeights, lean_experts, lean_formats
from legato.model.requantization import Requantization
from legato.model.weights import GlmWeights, MoeWeights, Residency, load_weights
from legato.quant import DenseExperts, DenseWeight, Format, Fp8BlockWeight, Nvfp4Experts
from legato.schedule import Request
from legato.types import SamplingParams
from tests.tiny import tiny_checkpoint

SMALL = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "first_k_dense_replace": 1, "n_routed_experts": 4}


def load(checkpoint: Checkpoint, drafts: DraftWeights, resident: Residency = Residency.STORED) -> GlmWeights:
    spec = stored_spec(checkpoint)
    return load_weights(
        checkpoint, spec, device="cpu", dtype=torch.float32, resident=resident, again=Requantization(drafts)
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_only_what_drafts_is_quantised_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, **SMALL))
    stored, lean = load(checkpoint, DraftWeights.STORED), load(checkpoint, DraftWeights.LEAN)
    assert stored.draft_head is None and stored.mtp is not None and lean.mtp is not None
    mlp, drafting = lean.layers[1].mlp, lean.mtp.layer.mlp
    assert isinstance(mlp, MoeWeights) and isinstance(drafting, MoeWeights)
    assert isinstance(mlp.experts, DenseExperts) and isinstance(lean.lm_head, DenseWeight)
    assert isinstance(drafting.experts, Nvfp4Experts)
    assert isinstance(lean.mtp.eh_proj, Fp8BlockWeight) and isinstance(lean.draft_head, Fp8BlockWeight)
    exact = stored.mtp.layer.mlp
    assert isinstance(exact, MoeWeights) and isinstance(exact.experts, DenseExperts)
    again = drafting.experts.dequantize(torch.float32)
    assert 0 < relative_error(again.w13, exact.experts.w13) < 0.15
    assert 0 < relative_error(again.w2, exact.experts.w2) < 0.15
    for found, expected in (
        (lean.mtp.eh_proj, stored.mtp.eh_proj),
        (lean.draft_head, stored.lm_head),
    ):
        assert 0 < relative_error(found.dequantize(torch.float32), expected.dequantize(torch.float32)) < 0.05


def test_what_has_few_bits_stays_as_it_is(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, "nvfp4", **SMALL))
    moe = load(checkpoint, DraftWeights.STORED).layers[1].mlp
    assert isinstance(moe, MoeWeights)
    assert lean_experts(moe.experts) is moe.experts
    spec = stored_spec(checkpoint)
    mtp = f"model.layers.{spec.num_layers}."
    formats = {f"{mtp}mlp.experts.0.up_proj": Format.FP8_BLOCK, f"{mtp}eh_proj": Format.DENSE, "lm_head": Format.DENSE}
    assert lean_formats(formats, spec) == {
        f"{mtp}mlp.experts.0.up_proj": Format.NVFP4, f"{mtp}eh_proj": Format.FP8_BLOCK, "lm_head": Format.DENSE
    }  # fmt: skip


@pytest.mark.full
def test_lean_drafts_change_no_token_and_few_acceptances() -> None:
    checkpoint = Checkpoint.open(EMBEDDED_CHECKPOINT)
    spec = stored_spec(checkpoint)
    settings = resolve(Config(), max_position=spec.max_position, has_mtp=True, cuda_available=False)
    settings = replace(settings, num_drafts=5, context=1024, cache_tokens=8192)
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
    texts: list[list[int]] = []
    lengths: list[float] = []
    for drafts in DraftWeights:
        engine = build_engine(spec, load(checkpoint, drafts, Residency.DENSE), settings)
        tokens: list[int] = []
        for number in range(4):
            engine.submit(Request(f"r{number}", tuple(range(100 + number, 140 + number)), params, (), number))
        while engine.has_work:
            for progress in engine.turn():
                tokens += progress.tokens
        texts.append(sorted(tokens))
        lengths.append(engine.stats.accept_length)
    print(f"accept length: stored {lengths[0]:.3f}, lean {lengths[1]:.3f}")
    assert texts[0] == texts[1]
    assert lengths[1] > 0.85 * lengths[0]
