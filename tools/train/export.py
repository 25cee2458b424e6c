"""Names the trained parameters as GLM-5.2 checkpoints do and writes sharded safetensors and the configuration files.

Owns config.json and the mapping from `model.py`'s parameters to checkpoint names, both ways. Called by `train.py`, or:

    python tools/train/export.py --checkpoint FILE.pt --tokenizer DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from model import Layer, Model, ModelConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SHARD_BYTES = 15 * 2**20 - 2**16
END_IDS = {"<|endoftext|>": 8172, "<|user|>": 8179, "<|observation|>": 8181}
ATTENTION = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")


def config_json(c: ModelConfig) -> dict[str, object]:
    """The contents of config.json."""
    dense = c.first_k_dense_replace
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "transformers_version": "5.12.0", "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": list(END_IDS.values()), "pad_token_id": END_IDS["<|endoftext|>"], "ep_size": 1,
        "first_k_dense_replace": dense, "head_dim": c.qk_nope_head_dim, "hidden_act": "silu",
        "hidden_size": c.hidden_size, "index_head_dim": c.index_head_dim, "index_n_heads": c.index_n_heads,
        "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 1, "index_topk": c.index_topk,
        "index_topk_freq": 3, "index_topk_pattern": None, "indexer_rope_interleave": True,
        "indexer_types": list(c.indexer_types), "initializer_range": 0.02, "intermediate_size": c.intermediate_size,
        "kv_lora_rank": c.kv_lora_rank, "max_position_embeddings": c.max_position_embeddings,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (c.num_hidden_layers - dense),
        "moe_intermediate_size": c.moe_intermediate_size, "moe_layer_freq": 1, "moe_router_dtype": "float32",
        "n_group": 1, "n_routed_experts": c.n_routed_experts, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": c.num_attention_heads, "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": c.num_hidden_layers, "num_key_value_heads": c.num_attention_heads,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": c.q_lora_rank,
        "qk_head_dim": c.qk_head_dim, "qk_nope_head_dim": c.qk_nope_head_dim, "qk_rope_head_dim": c.qk_rope_head_dim,
        "rms_norm_eps": c.rms_norm_eps, "rope_interleave": True,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "routed_scaling_factor": c.routed_scaling_factor, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": c.v_head_dim,
        "vocab_size": c.vocab_size,
    }


def layer_tensors(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor view) of one decoder layer."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", getattr(layer, norm)
    for name in ATTENTION:
        yield f"{prefix}.self_attn.{name}.weight", getattr(layer, name)
    if (indexer := layer.indexer) is not None:
        base = f"{prefix}.self_attn.indexer"
        yield f"{base}.wq_b.weight", indexer.wq_b
        yield f"{base}.wk.weight", indexer.wk
        yield f"{base}.k_norm.weight", indexer.k_norm_weight
        yield f"{base}.k_norm.bias", indexer.k_norm_bias
        yield f"{base}.weights_proj.weight", indexer.weights_proj
    if not hasattr(layer, "router"):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{prefix}.mlp.{name}.weight", getattr(layer, name)
        return
    yield f"{prefix}.mlp.gate.weight", layer.router
    yield f"{prefix}.mlp.gate.e_score_correction_bias", layer.router_bias
    for short in ("gate", "up", "down"):
        yield f"{prefix}.mlp.shared_experts.{short}_proj.weight", getattr(layer, f"shared_{short}")
        for e, weight in enumerate(getattr(layer, f"experts_{short}")):
            yield f"{prefix}.mlp.experts.{e}.{short}_proj.weight", weight


def named_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor view) of the whole model, in layer order."""
    yield "model.embed_tokens.weight", model.embed_tokens
    for i, layer in enumerate([*model.layers, model.mtp]):
        yield from layer_tensors(layer, f"model.layers.{i}")
    mtp = f"model.layers.{len(model.layers)}"
    yield f"{mtp}.enorm.weight", model.enorm
    yield f"{mtp}.hnorm.weight", model.hnorm
    yield f"{mtp}.eh_proj.weight", model.eh_proj
    yield f"{mtp}.shared_head.norm.weight", model.shared_head_norm
    yield "model.norm.weight", model.norm
    yield "lm_head.weight", model.lm_head


def write_checkpoint(model: Model, folder: Path, tokenizer: Path | None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes shards, index, config.json, generation_config.json and copies the tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in named_tensors(model):
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        value = tensor.detach().to("cpu", wanted).contiguous().clone()
        if size + value.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for shard in shards for t in shard.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config_json(model.config), indent=2) + "\n")
    generation = {"eos_token_id": list(END_IDS.values()), "pad_token_id": END_IDS["<|endoftext|>"], "temperature": 1.0,
                  "top_p": 0.95, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer is not None:
        for file in tokenizer.iterdir():
            shutil.copy(file, folder / file.name)


def read_checkpoint(model: Model, folder: Path) -> None:
    """Fills a model of the same shapes from the BF16 files that write_checkpoint wrote; every name must match."""
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(str(file)))
    wanted = dict(named_tensors(model))
    if wanted.keys() != stored.keys():
        raise ValueError(f"names differ: {sorted(wanted.keys() ^ stored.keys())[:8]}")
    with torch.no_grad():
        for name, view in wanted.items():
            view.copy_(stored[name])


def trainable(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a .pt file of train.py")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = Model(ModelConfig())
    model.load_state_dict(torch.load(args.checkpoint, map_location="cpu", weights_only=True))
    write_checkpoint(model, args.out, args.tokenizer)


if __name__ == "__main__":
    main()
