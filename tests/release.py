"""GLM-5.2 at full size, as headers only: the configuration and the stored layout of the public releases, without data.

Numbers that the releases are known by (parameters, bytes on disk) are checked against this in tests/model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from legato.model.checkpoint import ITEM_BYTES, SINGLE_FILE

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "head_dim": 192,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 1048576,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "indexer_types": ["full" if i < 3 or (i >= 6 and i % 4 == 2) else "shared" for i in range(78)],
    "index_share_for_mtp_iteration": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "attention_bias": False,
    "attention_dropout": 0.0,
}

Entries = dict[str, tuple[str, tuple[int, ...]]]
FULL_LAYERS = [i for i, kind in enumerate(CONFIG["indexer_types"]) if kind == "full"]


def release(kind: str) -> Entries:
    """`{name: (dtype, shape)}` of the BF16, FP8 or NVFP4 release."""
    entries: Entries = {"model.norm.weight": ("BF16", (6144,))}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        entries[name] = ("BF16", (154880, 6144))
    for layer in range(79):
        for name, shape in _layer(layer).items():
            entries |= _stored(f"model.layers.{layer}.{name}", shape, kind, layer)
    return entries


def _layer(layer: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (6144,),
        "post_attention_layernorm.weight": (6144,),
        "self_attn.q_a_proj.weight": (2048, 6144),
        "self_attn.q_a_layernorm.weight": (2048,),
        "self_attn.q_b_proj.weight": (16384, 2048),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 6144),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (28672, 512),
        "self_attn.o_proj.weight": (6144, 16384),
    }
    if layer in FULL_LAYERS or layer == 78:
        shapes |= {
            "self_attn.indexer.wq_b.weight": (4096, 2048),
            "self_attn.indexer.wk.weight": (128, 6144),
            "self_attn.indexer.k_norm.weight": (128,),
            "self_attn.indexer.k_norm.bias": (128,),
            "self_attn.indexer.weights_proj.weight": (32, 6144),
        }
    if layer < 3:
        return shapes | _mlp("mlp.", 12288)
    shapes |= {"mlp.gate.weight": (256, 6144), "mlp.gate.e_score_correction_bias": (256,)}
    for expert in range(256):
        shapes |= _mlp(f"mlp.experts.{expert}.", 2048)
    shapes |= _mlp("mlp.shared_experts.", 2048)
    if layer == 78:
        shapes |= {"enorm.weight": (6144,), "hnorm.weight": (6144,), "shared_head.norm.weight": (6144,)}
        shapes |= {"eh_proj.weight": (6144, 12288)}
    return shapes


def _mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    up, down = (width, 6144), (6144, width)
    return {prefix + "gate_proj.weight": up, prefix + "up_proj.weight": up, prefix + "down_proj.weight": down}


def _stored(name: str, shape: tuple[int, ...], kind: str, layer: int) -> Entries:
    module = name.removesuffix(".weight")
    if name.endswith("e_score_correction_bias"):
        return {name: ("F32", shape)}
    if len(shape) == 1:
        return {name: ("BF16", shape)}
    rows, columns = shape
    kept = name.endswith(("weights_proj.weight", "mlp.gate.weight", "eh_proj.weight"))
    if kind == "fp8" and not kept:
        scale = tuple(math.ceil(size / 128) for size in shape)
        return {name: ("F8_E4M3", shape), f"{module}.weight_scale_inv": ("F32", scale)}
    if kind == "nvfp4" and ".mlp.experts." in name and layer < 78:
        return {
            name: ("U8", (rows, columns // 2)),
            f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
            f"{module}.weight_scale_2": ("F32", ()),
            f"{module}.input_scale": ("F32", ()),
        }
    return {name: ("BF16", shape)}


class HeaderSource:
    """A checkpoint source that has headers and no data. `config` may differ from the release's."""

    label = "headers"

    def __init__(self, entries: Entries, config: dict[str, Any] | None = None) -> None:
        self.entries, self.config = entries, config or CONFIG

    def names(self) -> list[str]:
        return ["config.json", SINGLE_FILE]

    def text(self, name: str) -> str | None:
        return json.dumps(self.config) if name == "config.json" else None

    def header(self, name: str) -> dict[str, Any] | None:
        offset = 0
        header: dict[str, Any] = {}
        for tensor, (dtype, shape) in self.entries.items():
            end = offset + ITEM_BYTES[dtype] * math.prod(shape)
            header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        return header

    def path(self, name: str) -> Path:
        raise AssertionError(f"{name} was asked for, but a plan must not read data")
