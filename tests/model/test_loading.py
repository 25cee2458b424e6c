"""A tiny checkpoint in every format loads, and is bit for bit the model that scalar references spell out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec, survey
from legato.model.spec import ModelSpec
from legato.model.weights import GlmWeights, MoeWeights, Residency, load_weights
from legato.quant import (
    DenseExperts,
    DenseWeight,
    Fp8BlockExperts,
    Fp8BlockWeight,
    Int4Experts,
    Nvfp4Experts,
    StackedWeight,
)
from tests.tiny import dequantized, quantized, save_checkpoint, tiny_config, tiny_tensors, wide_config

KINDS = ("bf16", "fp8", "nvfp4", "int4-packed", "int4-nibbles")


def config_of(kind: str) -> dict[str, object]:
    sizes = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "n_routed_experts": 4}
    return wide_config(**sizes) if kind != "nvfp4" else tiny_config(**sizes)


def load(folder: Path, resident: Residency = Residency.DENSE, dtype: torch.dtype = torch.float32) -> GlmWeights:
    checkpoint = Checkpoint.open(folder)
    spec = stored_spec(checkpoint)
    return load_weights(checkpoint, spec, device="cpu", dtype=dtype, resident=resident)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of loaded weights with its path; formats are spelled out in float32."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif hasattr(value, "dequantize"):
        dense = value.dequantize(torch.float32)
        yield from (
            leaves(dense, path)
            if isinstance(dense, torch.Tensor)
            else ((f"{path}.{name}", getattr(dense, name)) for name in ("w13", "w2"))
        )
    elif isinstance(value, tuple):
        for index, entry in enumerate(value):
            yield from leaves(entry, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")


def assert_same(found: GlmWeights, expected: GlmWeights) -> None:
    ours, theirs = dict(leaves(found)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    different = [path for path, tensor in ours.items() if not torch.equal(tensor.float(), theirs[path].float())]
    assert not different


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_equals_its_dequantised_twin(kind: str, tmp_path: Path) -> None:
    config = config_of(kind)
    stored = quantized(config, tiny_tensors(config), kind)
    folder = save_checkpoint(tmp_path / kind, config, stored)
    twin = load(save_checkpoint(tmp_path / "twin", config, dequantized(stored, kind), shards=1))
    dense, kept = load(folder), load(folder, Residency.STORED)
    assert_same(dense, twin)
    assert_same(kept, twin)
    assert dense.mtp is not None
    moe = kept.layers[2].mlp
    assert isinstance(moe, MoeWeights)
    experts = {"fp8": Fp8BlockExperts, "nvfp4": Nvfp4Experts, "bf16": DenseExperts}.get(kind, Int4Experts)
    assert type(moe.experts) is experts
    assert type(kept.layers[0].attention.o) is (Fp8BlockWeight if kind == "fp8" else DenseWeight)


def test_every_tensor_lands_where_it_belongs(tmp_path: Path) -> None:
    config = config_of("bf16")
    source = tiny_tensors(config)
    weights = load(save_checkpoint(tmp_path, config, source))
    spec = ModelSpec.from_config(config)
    layer, prefix = weights.layers[2], "model.layers.2."

    def same(tensor: torch.Tensor, name: str) -> bool:
        return torch.equal(tensor, source[prefix + name].float())

    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MoeWeights)
    assert isinstance(mlp.experts, DenseExperts)
    ends = spec.q_lora_rank, spec.latent_dim, spec.index_dim, spec.index_heads
    q_a, kv_a, wk, gates = attention.qkv.dequantize(torch.float32).split(ends)
    assert same(q_a, "self_attn.q_a_proj.weight") and same(kv_a, "self_attn.kv_a_proj_with_mqa.weight")
    assert same(wk, "self_attn.indexer.wk.weight") and same(gates, "self_attn.indexer.weights_proj.weight")
    q_b, wq_b = attention.q.dequantize(torch.float32).split(
        (spec.num_heads * spec.qk_dim, spec.index_heads * spec.index_dim)
    )
    assert same(q_b, "self_attn.q_b_proj.weight") and same(wq_b, "self_attn.indexer.wq_b.weight")
    kv_b = torch.cat((attention.w_uk, attention.w_uv), dim=1).flatten(0, 1)
    assert same(kv_b, "self_attn.kv_b_proj.weight")
    assert attention.w_uk.shape == (spec.num_heads, spec.nope_dim, spec.kv_lora_rank)
    assert attention.indexer is not None
    assert same(attention.indexer.k_norm_bias, "self_attn.indexer.k_norm.bias")
    assert weights.layers[1].attention.indexer is None
    assert same(mlp.gate, "mlp.gate.weight")
    assert same(mlp.bias, "mlp.gate.e_score_correction_bias")
    assert same(mlp.experts.w13[3, spec.expert_intermediate :], "mlp.experts.3.up_proj.weight")
    assert same(mlp.experts.w2[1], "mlp.experts.1.down_proj.weight")
    assert mlp.shared is not None
    assert same(mlp.shared.down.dequantize(torch.float32), "mlp.shared_experts.down_proj.weight")
    assert weights.mtp is not None
    prefix = "model.layers.3."
    assert same(weights.mtp.eh_proj.weight.dequantize(torch.float32), "eh_proj.weight")
    assert same(weights.mtp.norm, "shared_head.norm.weight")
    assert weights.mtp.layer.attention.indexer is not None
    layer, seeded = weights.mtp.layer.attention, weights.mtp.seeded.attention
    assert seeded.indexer is None and seeded.o is layer.o
    for whole, part in ((layer.qkv, seeded.qkv), (layer.q, seeded.q)):
        assert torch.equal(part.dequantize(torch.float32), whole.dequantize(torch.float32)[: part.out_features])


def test_dtypes(tmp_path: Path) -> None:
    config = config_of("bf16")
    weights = load(save_checkpoint(tmp_path, config, tiny_tensors(config)), dtype=torch.bfloat16)
    moe = weights.layers[2].mlp
    assert isinstance(moe, MoeWeights)
    assert (moe.gate.dtype, moe.bias.dtype) == (torch.float32, torch.float32)
    indexer = weights.layers[0].attention.indexer
    assert indexer is not None
    assert {weights.embed.dtype, weights.norm.dtype, indexer.k_norm_bias.dtype} == {torch.bfloat16}


def test_unaligned_fp8_falls_back_without_changing_a_value(tmp_path: Path) -> None:
    """Expert width 32 and q_lora 48 end inside a block: no single FP8 tensor can hold the joined weights."""
    config = tiny_config()
    stored = quantized(config, tiny_tensors(config), "fp8")
    folder = save_checkpoint(tmp_path / "fp8", config, stored)
    kept = load(folder, Residency.STORED)
    moe = kept.layers[2].mlp
    assert isinstance(moe, MoeWeights)
    assert isinstance(moe.experts, DenseExperts)
    assert isinstance(kept.layers[2].attention.qkv, StackedWeight)
    assert_same(kept, load(folder))


def test_mtp_absent_unwanted_or_in_another_format(tmp_path: Path) -> None:
    config = config_of("bf16")
    tensors = tiny_tensors(config)
    mtp = "model.layers.3."
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp)}
    absent = Checkpoint.open(save_checkpoint(tmp_path / "absent", config, trunk))
    declared = ModelSpec.from_config(absent.config)
    assert declared.has_mtp
    assert not stored_spec(absent).has_mtp
    assert "no drafting" in survey(absent, declared).warnings[0]
    assert load_weights(absent, declared, device="cpu", dtype=torch.float32, resident=Residency.DENSE).mtp is None
    undeclared = save_checkpoint(tmp_path / "undeclared", config | {"num_nextn_predict_layers": 0}, tensors)
    assert load(undeclared).mtp is None
    reasons = set(survey(Checkpoint.open(undeclared), stored_spec(Checkpoint.open(undeclared))).ignored.values())
    assert reasons == {"the MTP layer is not used"}
    for kind, other in (("fp8", "bf16"), ("bf16", "fp8"), ("int4-packed", "bf16")):
        stored, replacement = quantized(config, tensors, kind), quantized(config, tensors, other)
        mixed = {name: tensor for name, tensor in stored.items() if not name.startswith(mtp)}
        mixed |= {name: tensor for name, tensor in replacement.items() if name.startswith(mtp)}
        weights = load(save_checkpoint(tmp_path / f"{kind}-{other}", config, mixed), Residency.STORED)
        assert weights.mtp is not None
        experts = weights.mtp.layer.mlp
        assert isinstance(experts, MoeWeights)
        assert isinstance(experts.experts, DenseExperts if other == "bf16" else Fp8BlockExperts)


def test_names_ignored_by_rule_are_never_read(tmp_path: Path) -> None:
    """Copies of embedding and head, indexers of shared layers and cache scales, all poisoned with NaN."""
    config = config_of("bf16")
    tensors = tiny_tensors(config)
    names = (
        "model.layers.1.self_attn.indexer.wk.weight",
        "model.layers.1.self_attn.indexer.k_norm.bias",
        "model.layers.3.shared_head.head.weight",
        "model.layers.3.shared_head.head.weight_scale",
        "model.layers.3.embed_tokens.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_scale",
    )
    poison = {name: torch.full((4, 4), float("nan")) for name in names}
    folder = save_checkpoint(tmp_path / "poisoned", config, tensors | poison)
    checkpoint = Checkpoint.open(folder)
    assert survey(checkpoint, stored_spec(checkpoint)).ignored.keys() == poison.keys()
    assert_same(load(folder), load(save_checkpoint(tmp_path / "clean", config, tensors)))


def test_indexers_on_every_layer_and_no_indexer_types(tmp_path: Path) -> None:
    """GLM-5 form: all layers full. With the schedule instead of the list, the pattern is the same."""
    config = config_of("bf16") | {"indexer_types": ["full"] * 3}
    tensors = tiny_tensors(config)
    del config["indexer_types"]
    weights = load(save_checkpoint(tmp_path / "glm5", config, tensors))
    assert all(layer.attention.indexer is not None for layer in weights.layers)
    scheduled = config | {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    shared = load(save_checkpoint(tmp_path / "scheduled", scheduled, tensors))
    assert [layer.attention.indexer is not None for layer in shared.layers] == [True, False, True]


def test_language_model_prefix(tmp_path: Path) -> None:
    config = config_of("bf16")
    tensors = tiny_tensors(config)
    plain = load(save_checkpoint(tmp_path / "plain", config, tensors))
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    assert_same(load(save_checkpoint(tmp_path / "inner", config, inner)), plain)
    outer = {"language_model." + name: tensor for name, tensor in tensors.items()}
    assert_same(load(save_checkpoint(tmp_path / "outer", config, outer)), plain)


def test_progress_counts_bytes_to_the_end(tmp_path: Path) -> None:
    config = config_of("nvfp4")
    folder = save_checkpoint(tmp_path, config, quantized(config, tiny_tensors(config), "nvfp4"))
    checkpoint = Checkpoint.open(folder)
    seen: list[tuple[int, int]] = []
    load_weights(
        checkpoint,
        stored_spec(checkpoint),
        device="cpu",
        dtype=torch.float32,
        resident=Residency.DENSE,
        progress=lambda done_bytes, total_bytes, label: seen.append((done_bytes, total_bytes)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    unread = sum(info.nbytes for name, info in checkpoint.tensors.items() if name.endswith("input_scale"))
    assert seen[-1][1] == checkpoint.nbytes - unread
