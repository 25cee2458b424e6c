"""Exclusion lists in every public spelling, and files that contradict them: a warning, and the file is believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.model.checkpoint import Checkpoint
from legato.model.declared import Exclusions, disagreements
from legato.model.inventory import stored_spec, survey
from legato.quant import Format
from tests.tiny import quantized, save_checkpoint, tiny_config, tiny_tensors

EXPERT = "model.layers.12.mlp.experts.7.up_proj"


@pytest.mark.parametrize(
    ("entry", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head_norm", False),
        ("model.layers.1", EXPERT, False),
        ("model.layers.12", EXPERT, True),
        ("model.layers.12.mlp.experts.7.up_proj.weight", EXPERT, True),
        ("model.layers.1*", EXPERT, True),
        ("model.layers.1.*", EXPERT, False),
        ("model.layers.78*", "model.layers.78.eh_proj", True),
        ("model.layers.12.self_attn*", "model.layers.12.self_attn.indexer.wk", True),
        ("re:.*experts.*", EXPERT, True),
        ("re:.*self_attn.*", EXPERT, False),
        ("re:(unbalanced", EXPERT, False),
        ("up_proj", EXPERT, True),
        ("gate_up_proj", EXPERT, True),
        ("model.layers.12.mlp.experts.7.gate_up_proj", EXPERT, True),
        ("model.layers.0.self_attn.fused_qkv_a_proj_with_mqa", "model.layers.0.self_attn.q_a_proj", True),
        ("model.layers.0.self_attn.indexers_proj", "model.layers.0.self_attn.indexer.weights_proj", True),
        ("model.layers.78.eh_proj", "model.layers.78.eh_proj", True),
    ],
)
def test_spellings(entry: str, module: str, excluded: bool) -> None:
    assert (module in Exclusions.of([entry])) is excluded


def test_disagreements_are_warnings() -> None:
    found = {"a.q": Format.FP8_BLOCK, "a.k": Format.DENSE, "b.mlp.gate": Format.DENSE}
    assert disagreements({}, {"a.k": Format.DENSE}) == []
    assert "no quantization_config" in disagreements({}, found)[0]
    agreeing = {"quantization_config": {"modules_to_not_convert": ["a.k"]}}
    assert disagreements(agreeing, found) == []
    contrary = disagreements({"quantization_config": {"ignore": ["a.q"]}}, found)
    assert ["excludes them" in contrary[0], "does not exclude them" in contrary[1]] == [True, True]
    many = {f"a.{i}": Format.NVFP4 for i in range(9)}
    assert disagreements({}, many)[0].startswith("9 modules")
    assert "a.3" not in disagreements({}, many)[0]


def test_a_list_that_lies_changes_nothing(tmp_path: Path) -> None:
    config = tiny_config() | {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["q_a_proj"]}}
    folder = save_checkpoint(tmp_path, config, quantized(config, tiny_tensors(config), "fp8"))
    checkpoint = Checkpoint.open(folder)
    inventory = survey(checkpoint, stored_spec(checkpoint))
    inventory.require()
    assert inventory.linears["model.layers.0.self_attn.q_a_proj"].format is Format.FP8_BLOCK
    assert any("excludes them from quantisation" in warning and "q_a_proj" in warning for warning in inventory.warnings)
