"""The configuration: what is read, how full and shared layers are derived, what is refused and by which name."""

from __future__ import annotations

import pytest

from legato.model.names import Group, Kind, expected
from legato.model.spec import ModelSpec, SpecError
from tests.release import CONFIG, FULL_LAYERS
from tests.tiny import tiny_config, tiny_tensors

RELEASED_FULL = [0, 1, 2, *range(6, 75, 4)]


def without(*fields: str, **changes: object) -> dict[str, object]:
    return {key: value for key, value in CONFIG.items() if key not in fields} | changes


def test_the_release() -> None:
    spec = ModelSpec.from_config(CONFIG, name="GLM-5.2")
    assert [i for i in range(78) if spec.is_full(i)] == RELEASED_FULL == FULL_LAYERS
    assert (spec.num_full, spec.has_mtp, spec.is_full(78)) == (21, True, True)
    assert (spec.latent_dim, spec.qk_dim, spec.attention_scale) == (576, 256, 0.0625)
    assert spec.rope_theta == 8e6, "rope_theta is nested in rope_parameters"
    assert (spec.rms_eps, spec.latent_eps, spec.routed_scale) == (1e-5, 1e-5, 2.5)
    assert spec.eos_ids == (154820, 154827, 154829)
    assert [i for i in range(78) if spec.is_dense(i)] == [0, 1, 2]
    assert spec.index_rope_interleaved


def test_full_layers_by_schedule_pattern_or_list() -> None:
    listed = ModelSpec.from_config(CONFIG).indexer_kinds
    assert ModelSpec.from_config(without("indexer_types")).indexer_kinds == listed
    pattern = "".join("F" if kind == "full" else "S" for kind in listed)
    by_pattern = without("indexer_types", "index_topk_freq", index_topk_pattern=pattern)
    assert ModelSpec.from_config(by_pattern).indexer_kinds == listed
    every = without("indexer_types", "index_topk_freq", "index_skip_topk_offset")
    assert set(ModelSpec.from_config(every).indexer_kinds) == {"full"}, "GLM-5: no schedule, every layer is full"
    shifted = without("indexer_types", "index_skip_topk_offset")
    assert ModelSpec.from_config(shifted).indexer_kinds.index("shared") == 2, "the default offset is 2"
    both = without(index_topk_pattern="F" * 78)
    assert ModelSpec.from_config(both).indexer_kinds == listed, "the list wins"


def test_older_and_smaller_family_members() -> None:
    flat = without("rope_parameters", "mlp_layer_types", "eos_token_id", rope_theta=1e6, eos_token_id=7)
    spec = ModelSpec.from_config(flat)
    assert (spec.rope_theta, spec.first_dense, spec.eos_ids) == (1e6, 3, (7,))
    assert not ModelSpec.from_config(without("indexer_rope_interleave")).index_rope_interleaved
    assert not ModelSpec.from_config(without("num_nextn_predict_layers")).has_mtp
    nvidia = without("moe_router_dtype", bos_token_id=0, mlp_bias=False, num_experts=256, a_field_of_tomorrow=True)
    assert ModelSpec.from_config(nvidia) == ModelSpec.from_config(CONFIG)


REFUSED = {
    "model_type": (without(model_type="deepseek_v32"), "DeepSeek-V3.2"),
    "model_type ": (without(model_type="glm5_next"), "GLM-5.3-Flash"),
    "model_type  ": (without(model_type="llama"), "'llama' is not supported"),
    "model_type   ": (without("model_type"), "missing"),
    "hidden_size": (without("hidden_size"), "missing"),
    "num_hidden_layers": (without(num_hidden_layers="78"), "expected a whole number"),
    "rope_parameters.rope_theta": (without("rope_parameters"), "missing"),
    "rope_parameters.rope_type": (without(rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"}), "'yarn'"),
    "indexer_types": (without(indexer_types=["shared"] + ["full"] * 77), "layer 0 is 'shared'"),
    "indexer_types ": (without(indexer_types=["full"] * 77), "expected 78 entries"),
    "indexer_types  ": (without(indexer_types=["full"] * 77 + ["half"]), "layer 77"),
    "index_topk_freq": (without("indexer_types", index_topk_freq=0.5), "whole numbers"),
    "n_group": (without(n_group=8), "only 1 is implemented"),
    "scoring_func": (without(scoring_func="softmax"), "'softmax'"),
    "attention_bias": (without(attention_bias=True), "only False"),
    "tie_word_embeddings": (without(tie_word_embeddings=True), "only False"),
    "mlp_layer_types": (without(mlp_layer_types=["sparse", "dense"] * 39), "followed by"),
    "first_k_dense_replace": (without(first_k_dense_replace=1), "3 dense layers"),
    "num_nextn_predict_layers": (without(num_nextn_predict_layers=3), "expected 0 or 1"),
    "num_experts_per_tok": (without(num_experts_per_tok=257), "at most"),
    "num_experts": (without(num_experts=257), "disagrees"),
    "qk_head_dim": (without(qk_head_dim=192), "192 + 64"),
    "num_key_value_heads": (without(num_key_value_heads=1), "expected num_attention_heads"),
    "rms_norm_eps": (without(rms_norm_eps=float("nan")), "finite"),
    "eos_token_id": (without(eos_token_id=["</s>"]), "token id"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_refusals_name_the_field(field: str) -> None:
    config, words = REFUSED[field]
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_config(config)
    assert caught.value.field == field.strip()
    assert words in str(caught.value)
    assert field.strip() in str(caught.value)


def test_the_table_names_exactly_the_tensors_of_a_checkpoint() -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    table = {
        entry.name + (".weight" if entry.kind is Kind.LINEAR else ""): entry.shape
        for entry in expected(ModelSpec.from_config(config))
    }
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_experts_are_the_bulk_of_the_release() -> None:
    counts: dict[Group, int] = {}
    for entry in expected(ModelSpec.from_config(without(num_nextn_predict_layers=0))):
        size = entry.shape[0] * (entry.shape[1] if len(entry.shape) > 1 else 1)
        counts[entry.group] = counts.get(entry.group, 0) + size
    assert counts[Group.EXPERTS] == 75 * 256 * 3 * 2048 * 6144
