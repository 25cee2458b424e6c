"""Dense weights in FP8 at load: which ones, what the model then computes, and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legato.model.checkpoint import Checkpoint
from legato.model.convert import Target
from legato.model.dummy import Recipe, dummy_weights
from legato.model.inventory import stored_spec, survey
from legato.model.requantization import AS_STORED, DenseFormat, Requantization
from legato.model.weights import GlmWeights, MlpWeights, MoeWeights, Residency, load_weights
from legato.parallel import ONE_RANK
from legato.quant import DenseWeight, Format, Fp8BlockWeight
from legato.quant.weight import Weight
from tests.tiny import tiny_checkpoint

SMALL = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "first_k_dense_replace": 1, "n_routed_experts": 4}
IN_FP8 = Requantization(dense=DenseFormat.FP8)


def load(checkpoint: Checkpoint, again: Requantization, resident: Residency = Residency.STORED) -> GlmWeights:
    spec = stored_spec(checkpoint)
    return load_weights(checkpoint, spec, device="cpu", dtype=torch.float32, resident=resident, again=again)


def quantised(weights: GlmWeights) -> list[Weight]:
    """What dense-format names, of every layer: attention, the dense layer, shared experts."""
    assert weights.mtp is not None
    found: list[Weight] = []
    for layer in (*weights.layers, weights.mtp.layer, weights.mtp.seeded):
        found += [layer.attention.qkv, layer.attention.q, layer.attention.o]
        mlp = layer.mlp.shared if isinstance(layer.mlp, MoeWeights) else layer.mlp
        assert isinstance(mlp, MlpWeights)
        found += [mlp.gate_up, mlp.down]
    return found


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint(tmp_path_factory.mktemp("nvfp4"), "nvfp4", **SMALL))


def test_the_dense_weights_of_an_nvfp4_checkpoint_are_quantised_and_no_others(nvfp4: Checkpoint) -> None:
    stored, again = load(nvfp4, AS_STORED), load(nvfp4, IN_FP8)
    for before, after in zip(quantised(stored), quantised(again), strict=True):
        assert isinstance(before, DenseWeight) and isinstance(after, Fp8BlockWeight)
        error = (after.dequantize(torch.float32) - before.tensor).norm() / before.tensor.norm()
        assert 0 < float(error) < 0.05
    assert isinstance(again.lm_head, DenseWeight) and again.draft_head is None
    assert again.mtp is not None and isinstance(again.mtp.eh_proj.weight, DenseWeight)
    one, other = stored.layers[1].mlp, again.layers[1].mlp
    assert isinstance(one, MoeWeights) and isinstance(other, MoeWeights)
    assert one.experts.format is other.experts.format is Format.NVFP4 and torch.equal(one.gate, other.gate)
    assert torch.equal(stored.layers[0].attention.w_uk, again.layers[0].attention.w_uk)


def test_where_weights_are_kept_dense_they_have_the_values_of_fp8(nvfp4: Checkpoint) -> None:
    for kept, dense in zip(
        quantised(load(nvfp4, IN_FP8)), quantised(load(nvfp4, IN_FP8, Residency.DENSE)), strict=True
    ):
        assert isinstance(dense, DenseWeight)
        assert torch.equal(dense.tensor, kept.dequantize(torch.float32))


def test_what_is_stored_in_fp8_is_not_quantised_twice(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, "fp8", **SMALL))
    for resident in Residency:
        for before, after in zip(
            quantised(load(checkpoint, AS_STORED, resident)), quantised(load(checkpoint, IN_FP8, resident)), strict=True
        ):
            assert type(before) is type(after)
            assert torch.equal(before.dequantize(torch.float32), after.dequantize(torch.float32))


def test_drawn_weights_and_the_count_of_bytes_follow(nvfp4: Checkpoint) -> None:
    spec = stored_spec(nvfp4)
    recipe = Recipe(Target.NVFP4)
    drawn = dummy_weights(spec, ONE_RANK, recipe, device="cpu", dtype=torch.float32, again=IN_FP8)
    assert all(isinstance(weight, Fp8BlockWeight) for weight in quantised(drawn))
    stored = {name: linear.format for name, linear in survey(nvfp4, spec).linears.items()}
    formats = IN_FP8.formats(stored, spec)
    changed = {name.split(".", 3)[3] for name in stored if formats[name] is not stored[name]}
    assert changed == {
        *(f"self_attn.{part}_proj" for part in ("q_a", "q_b", "o")), "self_attn.kv_a_proj_with_mqa",
        *(f"self_attn.indexer.{part}" for part in ("wq_b", "wk", "weights_proj")),
        *(f"mlp.{kind}{part}_proj" for kind in ("", "shared_experts.") for part in ("gate", "up", "down")),
    }  # fmt: skip
    assert AS_STORED.formats(stored, spec) == stored
