"""The forward pass over weights kept in each format gives the logits of the dequantised twin, past `index_topk`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legato.config import CacheConfig, Config, ExecutionConfig, ScheduleConfig, resolve
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.weights import Residency, load_weights
from legato.plan import Admit, Extend, Plan
from legato.runtime.batch import build_batch
from legato.runtime.runner import Runner
from tests.model.test_loading import KINDS, config_of
from tests.tiny import dequantized, quantized, save_checkpoint, tiny_tensors

LENGTH = 40


@torch.inference_mode()
def logits(folder: Path, resident: Residency) -> torch.Tensor:
    """[LENGTH, W] of one prefill in float32, caches unquantised."""
    checkpoint = Checkpoint.open(folder)
    spec = stored_spec(checkpoint)
    assert spec.index_topk * 4 < LENGTH
    weights = load_weights(checkpoint, spec, device="cpu", dtype=torch.float32, resident=resident)
    config = Config(
        cache=CacheConfig(latent="float32", index="float32", tokens=256),
        schedule=ScheduleConfig(max_running=2),
        execution=ExecutionConfig(device="cpu"),
        num_drafts=0,
    )
    settings = resolve(config, max_position=spec.max_position, has_mtp=False, cuda_available=False)
    runner = Runner(spec, weights, settings)
    runner.rows.admit(Admit(1, (1,), LENGTH, (), 0.0, 0, 1.0, 0.0, 0, -1))
    tokens = tuple(torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist())
    batch = build_batch(Plan(0, (), (Extend(1, 0, tokens, None),), ()), runner.rows, spec)
    target = runner.iteration.target
    return target.logits(target.hidden(batch.ids, batch.step, runner.iteration.caches))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_each_format_equal_the_twins(kind: str, tmp_path: Path) -> None:
    config = config_of(kind)
    stored = quantized(config, tiny_tensors(config), kind)
    folder = save_checkpoint(tmp_path / kind, config, stored)
    twin = save_checkpoint(tmp_path / "twin", config, dequantized(stored, kind))
    expected = logits(twin, Residency.DENSE)
    assert torch.equal(logits(folder, Residency.DENSE), expected), "the same weights give the same bits"
    kept = logits(folder, Residency.STORED)
    assert float((kept - expected).abs().max()) < 1e-4 < float(expected.abs().max())
    if kind != "bf16":
        unquantised = save_checkpoint(tmp_path / "bf16", config, tiny_tensors(config))
        assert float((logits(unquantised, Residency.DENSE) - expected).abs().max()) > 1e-3, "quantisation must show"
