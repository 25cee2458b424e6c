"""Tiny random GLM-5.2 checkpoints in the real naming, in every format, for any test that needs one.

Written from the published layout and not from `legato.model.names`, so that the two check each other. Norms, biases and
the router's correction are random: their defaults (1, 0, 0) hide whole classes of bugs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from legato.quant.formats import Format
from legato.quant.fp8_block import quantize_fp8_block
from legato.quant.int4 import quantize_int4
from legato.quant.nvfp4 import quantize_nvfp4
from legato.quant.stored import spell
from legato.quant.weight import Weight
from tests.scalar import dequantize_parts

Tensors = dict[str, torch.Tensor]


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """7 + 1 layers, hidden 64, 4 heads, 8 experts top-2, 32 index heads, index_topk 8. Pass a value of None to drop a
    key."""
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "qk_head_dim": 40,
        "v_head_dim": 32,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 512,
        "index_topk": 8,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "indexer_types": ["full", "full", "shared", "shared", "full", "shared", "shared"],
        "index_share_for_mtp_iteration": True,
        "num_nextn_predict_layers": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config.update(overrides)
    return {key: value for key, value in config.items() if value is not None or key in ("bos_token_id", "eos_token_id")}


def wide_config(**overrides: Any) -> dict[str, Any]:
    """The tiny model with hidden and expert width 128 and an aligned q_lora, so that INT4 groups and FP8 blocks fit."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128, "n_routed_experts": 4}
    return tiny_config(**{**sizes, **overrides})


def indexer_layers(config: Mapping[str, Any]) -> list[int]:
    """Layers with indexer tensors on disk: the full ones and the MTP layer."""
    return [i for i, kind in enumerate(config["indexer_types"]) if kind == "full"] + [config["num_hidden_layers"]]


def tiny_tensors(config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Every tensor of the model, the MTP layer included, in the names of the BF16 release."""
    draw = _Draw(seed, dtype)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    tensors = {
        "model.embed_tokens.weight": draw.matrix(vocab, hidden),
        "model.norm.weight": draw.norm(hidden),
        "lm_head.weight": draw.matrix(vocab, hidden),
    }
    for layer in range(layers + 1):
        prefix = f"model.layers.{layer}."
        tensors |= _attention(config, prefix, draw)
        if layer in indexer_layers(config):
            tensors |= indexer_tensors(config, prefix, draw)
        tensors |= (
            _mlp(config, prefix + "mlp.", config["intermediate_size"], draw)
            if layer < config["first_k_dense_replace"]
            else _moe(config, prefix + "mlp.", draw)
        )
    prefix = f"model.layers.{layers}."
    tensors |= {
        prefix + "enorm.weight": draw.norm(hidden),
        prefix + "hnorm.weight": draw.norm(hidden),
        prefix + "eh_proj.weight": draw.matrix(hidden, 2 * hidden),
        prefix + "shared_head.norm.weight": draw.norm(hidden),
    }
    return tensors


class _Draw:
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return (0.1 * self.normal(rows, columns)).to(self.dtype)

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.3 * self.normal(size)).to(self.dtype)


def _attention(config: Mapping[str, Any], prefix: str, draw: _Draw) -> Tensors:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        prefix + "input_layernorm.weight": draw.norm(hidden),
        prefix + "post_attention_layernorm.weight": draw.norm(hidden),
        prefix + "self_attn.q_a_proj.weight": draw.matrix(q_lora, hidden),
        prefix + "self_attn.q_a_layernorm.weight": draw.norm(q_lora),
        prefix + "self_attn.q_b_proj.weight": draw.matrix(heads * (nope + rope), q_lora),
        prefix + "self_attn.kv_a_proj_with_mqa.weight": draw.matrix(kv_lora + rope, hidden),
        prefix + "self_attn.kv_a_layernorm.weight": draw.norm(kv_lora),
        prefix + "self_attn.kv_b_proj.weight": draw.matrix(heads * (nope + value), kv_lora),
        prefix + "self_attn.o_proj.weight": draw.matrix(hidden, heads * value),
    }


def indexer_tensors(config: Mapping[str, Any], prefix: str, draw: _Draw) -> Tensors:
    """The indexer of one layer."""
    heads, dim, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    prefix += "self_attn.indexer."
    return {
        prefix + "wq_b.weight": draw.matrix(heads * dim, config["q_lora_rank"]),
        prefix + "wk.weight": draw.matrix(dim, hidden),
        prefix + "k_norm.weight": draw.norm(dim),
        prefix + "k_norm.bias": (0.1 * draw.normal(dim)).to(draw.dtype),
        prefix + "weights_proj.weight": draw.matrix(heads, hidden),
    }


def _mlp(config: Mapping[str, Any], prefix: str, width: int, draw: _Draw) -> Tensors:
    hidden = config["hidden_size"]
    return {
        prefix + "gate_proj.weight": draw.matrix(width, hidden),
        prefix + "up_proj.weight": draw.matrix(width, hidden),
        prefix + "down_proj.weight": draw.matrix(hidden, width),
    }


def _moe(config: Mapping[str, Any], prefix: str, draw: _Draw) -> Tensors:
    width, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    tensors = {
        prefix + "gate.weight": draw.matrix(experts, config["hidden_size"]),
        prefix + "gate.e_score_correction_bias": 0.3 * draw.normal(experts),
    }
    for expert in range(experts):
        tensors |= _mlp(config, f"{prefix}experts.{expert}.", width, draw)
    return tensors | _mlp(config, prefix + "shared_experts.", width * config["n_shared_experts"], draw)


FP8_MODULES = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "indexer.wq_b",
    "indexer.wk",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def quantized(config: Mapping[str, Any], tensors: Tensors, kind: str) -> Tensors:
    """The tensors as a release stores them: "bf16", "fp8" (all linears but a few), "nvfp4" (routed experts of the
    decoder layers), "int4-packed" and "int4-nibbles" (routed experts of all layers)."""
    mtp = f"model.layers.{config['num_hidden_layers']}."
    if kind == "bf16":
        return dict(tensors)
    if kind == "fp8":
        return _replace(tensors, lambda name: name.endswith(FP8_MODULES), quantize_fp8_block, Format.FP8_BLOCK)
    if kind == "nvfp4":
        chosen = _replace(
            tensors, lambda name: ".experts." in name and not name.startswith(mtp), quantize_nvfp4, Format.NVFP4
        )
        scales = [name for name in chosen if name.endswith("weight_scale_2")]
        return chosen | {name.replace("weight_scale_2", "input_scale"): torch.tensor(0.01) for name in scales}
    layout = {"int4-packed": Format.INT4_PACKED, "int4-nibbles": Format.INT4_NIBBLES}[kind]
    return _replace(tensors, lambda name: ".experts." in name, quantize_int4, layout)


def _replace(
    tensors: Tensors, chosen: Callable[[str], bool], quantize: Callable[[torch.Tensor], Weight], layout: Format
) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and tensor.dim() == 2 and chosen(module):
            out |= {f"{module}.{suffix}": part for suffix, part in spell(quantize(tensor), layout).items()}
        else:
            out[name] = tensor
    return out


def dequantized(tensors: Tensors, kind: str) -> Tensors:
    """The float32 twin of `quantized(tensors, kind)`, by the scalar references of tests/scalar.py."""
    modules: dict[str, Tensors] = {}
    out: Tensors = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if f"{module}.weight_scale" in tensors or f"{module}.weight_scale_inv" in tensors:
            modules.setdefault(module, {})[suffix] = tensor
        else:
            out[name] = tensor.float()
    return out | {f"{module}.weight": dequantize_parts(parts, kind) for module, parts in modules.items()}


def save_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 3) -> Path:
    """Writes config.json, the shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tiny_checkpoint(folder: Path, kind: str = "bf16", seed: int = 0, **overrides: Any) -> Path:
    """A saved checkpoint; INT4 kinds use `wide_config`."""
    config = wide_config(**overrides) if kind.startswith("int4") else tiny_config(**overrides)
    return save_checkpoint(folder, config, quantized(config, tiny_tensors(config, seed), kind))
