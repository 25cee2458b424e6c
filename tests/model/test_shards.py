"""The ranks' parts of a checkpoint, put together again, are the checkpoint, in every format; what does not divide is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.model.checkpoint import Checkpoint
from legato.model.convert import Target
from legato.model.dummy import Recipe, dummy_weights, router_spread
from legato.model.inventory import stored_spec
from legato.model.spec import ModelSpec, SpecError
from legato.model.weights import GlmWeights, MlpWeights, MoeWeights, Residency, load_weights
from legato.parallel import Mesh
from tests.tiny import quantized, save_checkpoint, tiny_config, tiny_tensors

KINDS = ("bf16", "fp8", "nvfp4", "int4-packed", "int4-nibbles")
SIZES = {
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "vocab_size": 250,
    "hidden_size": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 128,
    "index_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
}
"""Widths whose halves end on blocks of 128."""


def saved(folder: Path, kind: str, **overrides: object) -> Checkpoint:
    config = tiny_config(**{**SIZES, **overrides})
    return Checkpoint.open(save_checkpoint(folder, config, quantized(config, tiny_tensors(config), kind)))


def load(checkpoint: Checkpoint, mesh: Mesh, resident: Residency = Residency.STORED) -> GlmWeights:
    spec = stored_spec(checkpoint)
    return load_weights(checkpoint, spec, device="cpu", dtype=torch.float32, resident=resident, mesh=mesh)


def halves(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate rows and up rows."""
    gate, up = matrix.chunk(2, dim=-2)
    return gate, up


def same_gate_up(parts: list[torch.Tensor], whole: torch.Tensor) -> bool:
    gates, ups = zip(*map(halves, parts), strict=True)
    return torch.equal(torch.cat([torch.cat(gates, -2), torch.cat(ups, -2)], -2), whole)


def assert_together(parts: list[GlmWeights], whole: GlmWeights) -> None:
    """Every sharded weight of the ranks, joined, and every other one on each of them, is the whole model's."""
    float32 = torch.float32
    head = torch.cat([part.lm_head.dequantize(float32) for part in parts])
    assert torch.equal(head[: whole.lm_head.out_features], whole.lm_head.dequantize(float32))
    assert not head[whole.lm_head.out_features :].any()
    assert len({part.lm_head.out_features for part in parts}) == 1
    assert all(torch.equal(part.embed, whole.embed) for part in parts)
    assert whole.mtp is not None
    for index in range(len(whole.layers) + 1):
        layers = [part.layers[index] if index < len(part.layers) else part.mtp.layer for part in parts]
        layer = whole.layers[index] if index < len(whole.layers) else whole.mtp.layer
        attentions = [one.attention for one in layers]
        for name in ("w_uk", "w_uv"):
            joined = torch.cat([getattr(attention, name) for attention in attentions])
            assert torch.equal(joined, getattr(layer.attention, name)), name
        columns = torch.cat([attention.o.dequantize(float32) for attention in attentions], dim=1)
        assert torch.equal(columns, layer.attention.o.dequantize(float32))
        for one in layers:
            assert torch.equal(one.input_norm, layer.input_norm)
        mlps = [one.mlp for one in layers]
        dense = [mlp if isinstance(mlp, MlpWeights) else mlp.shared for mlp in mlps]
        whole_dense = layer.mlp if isinstance(layer.mlp, MlpWeights) else layer.mlp.shared
        assert same_gate_up([mlp.gate_up.dequantize(float32) for mlp in dense], whole_dense.gate_up.dequantize(float32))
        down = torch.cat([mlp.down.dequantize(float32) for mlp in dense], dim=1)
        assert torch.equal(down, whole_dense.down.dequantize(float32))
        if isinstance(layer.mlp, MoeWeights):
            experts = [mlp.experts.dequantize(float32) for mlp in mlps]
            whole_experts = layer.mlp.experts.dequantize(float32)
            assert same_gate_up([one.w13 for one in experts], whole_experts.w13)
            assert torch.equal(torch.cat([one.w2 for one in experts], dim=2), whole_experts.w2)
            assert all(torch.equal(mlp.gate, layer.mlp.gate) for mlp in mlps)
            assert all(type(mlp.experts) is type(layer.mlp.experts) for mlp in mlps)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_hold_the_model(kind: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, kind)
    assert_together([load(checkpoint, Mesh(rank, 2)) for rank in range(2)], load(checkpoint, Mesh(0, 1)))


def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "bf16")
    parts = [load(checkpoint, Mesh(rank, 4), Residency.DENSE) for rank in range(4)]
    assert [part.lm_head.out_features for part in parts] == [63] * 4
    assert_together(parts, load(checkpoint, Mesh(0, 1), Residency.DENSE))


def test_a_rank_reads_its_part_only(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "bf16")
    read: list[tuple[int, int]] = []

    def watch(done_bytes: int, total_bytes: int, label: str) -> None:
        read.append((done_bytes, total_bytes))

    load_weights(
        checkpoint, stored_spec(checkpoint), device="cpu", dtype=torch.float32, resident=Residency.STORED,
        progress=watch, mesh=Mesh(1, 2),
    )  # fmt: skip
    done, total = read[-1]
    assert done == total < 0.75 * checkpoint.nbytes


@pytest.mark.parametrize(
    ("kind", "ranks", "field", "tensor"),
    [
        ("bf16", 3, "num_attention_heads", "q_b_proj"),
        ("bf16", 8, "num_attention_heads", "q_b_proj"),  # 512 rows would divide, into halves of heads
        ("fp8", 2, "intermediate_size", "fp8 in blocks of 128"),
    ],
)
def test_what_does_not_divide_is_named(kind: str, ranks: int, field: str, tensor: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, kind, intermediate_size=384)
    with pytest.raises(SpecError, match=tensor) as raised:
        load(checkpoint, Mesh(0, ranks))
    assert raised.value.field == field


@pytest.mark.parametrize("target", [Target.NVFP4, None])
def test_dummy_weights_are_shaped_like_loaded_ones(target: Target | None, tmp_path: Path) -> None:
    """The same classes and sizes as a checkpoint of that format gives, and what is replicated is the same on all ranks."""
    checkpoint = saved(tmp_path, "bf16" if target is None else target.value)
    spec = stored_spec(checkpoint)
    loaded = load(checkpoint, Mesh(1, 2))
    drawn = [
        dummy_weights(spec, Mesh(rank, 2), Recipe(target, spread=0.1), device="cpu", dtype=torch.float32)
        for rank in range(2)
    ]
    for layer, other in zip(loaded.layers, drawn[1].layers, strict=True):
        assert other.attention.o.nbytes == layer.attention.o.nbytes
        assert other.attention.w_uk.shape == layer.attention.w_uk.shape
        assert type(other.mlp) is type(layer.mlp)
    mlp, other = loaded.layers[1].mlp, drawn[1].layers[1].mlp
    assert isinstance(mlp, MoeWeights) and isinstance(other, MoeWeights)
    assert (type(other.experts), other.experts.nbytes) == (type(mlp.experts), mlp.experts.nbytes)
    assert torch.equal(drawn[0].embed, drawn[1].embed)
    assert not torch.equal(drawn[0].layers[0].attention.w_uk, drawn[1].layers[0].attention.w_uk)
    assert drawn[0].lm_head.out_features == loaded.lm_head.out_features


def test_a_router_reaches_as_many_experts_as_asked() -> None:
    spec = replace(ModelSpec.from_config(tiny_config()), num_experts=256, experts_per_token=8)
    assert router_spread(spec, 44, 6) == 0.0
    spread = router_spread(spec, 33, 6)
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(256, generator=generator) * spread
    chosen = (torch.randn(500, 6, 256, generator=generator).sigmoid() + bias).topk(8).indices.view(500, -1)
    assert 31 < sum(len(set(ids)) for ids in chosen.tolist()) / 500 < 35
    with pytest.raises(SpecError, match="between 8 and 44"):
        router_spread(spec, 60, 6)
