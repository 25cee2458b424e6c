"""The `quantization_config` blocks that other engines read, per target of `legato quantize`.

Owns their spelling only: Legato itself believes the files (`legato.model.declared` compares). Called by
`legato.model.convert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legato.model.names import TRUNK, Kind, layer_prefix, layer_rows
from legato.model.spec import ModelSpec
from legato.quant.formats import BLOCK, NVFP4_GROUP, Format

PRODUCER = {"name": "legato"}


def quantization_blocks(
    target: str, formats: Mapping[str, Format], spec: ModelSpec
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """`quantization_config` for config.json, and the content of hf_quant_config.json where the target has one.

    Sources: zai-org/GLM-5.2-FP8 and nvidia/GLM-5.2-NVFP4 (fp8, nvfp4), vllm-project/compressed-tensors "pack-quantized"
    (int4), sgl-project/sglang `w4afp8` (int4-fp8).
    """
    kept = [module for module, stored in formats.items() if stored is Format.DENSE]
    if target == "fp8":
        return _fp8(kept, spec), None
    if target == "nvfp4":
        return _nvfp4(spec)
    if target == "int4":
        return _int4(kept), None
    return {**_fp8(kept, spec), "quant_method": "w4afp8", "group_size": BLOCK}, None


def _fp8(kept: list[str], spec: ModelSpec) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*kept, *_float_modules(spec)],
    }


def _float_modules(spec: ModelSpec) -> list[str]:
    """Modules that are floating point in every format: embedding, norms, the router's correction."""
    names = [row.name for row in TRUNK if row.kind is Kind.FLOAT]
    for layer in range(spec.num_layers + int(spec.has_mtp)):
        names += [layer_prefix(layer) + row.name for row in layer_rows(spec, layer) if row.kind is Kind.FLOAT]
    return list(dict.fromkeys(name.removesuffix(".weight").removesuffix(".bias") for name in names))


def _nvfp4(spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    excluded = ["lm_head", "model.embed_tokens"]
    for layer in range(spec.num_layers):
        if spec.is_dense(layer):
            excluded.append(f"{layer_prefix(layer)}*")
        else:
            excluded += [f"{layer_prefix(layer)}self_attn*", f"{layer_prefix(layer)}mlp.shared_experts*"]
    if spec.has_mtp:
        excluded.append(f"{layer_prefix(spec.num_layers)}*")
    operand = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
    group = {"weights": operand, "targets": ["Linear"]}
    block = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": group},
        "ignore": excluded,
        "producer": PRODUCER,
    }
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": NVFP4_GROUP,
        "exclude_modules": excluded,
    }
    return block, {"producer": PRODUCER, "quantization": quantization}


def _int4(kept: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": BLOCK,
        "dynamic": False,
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
    }
