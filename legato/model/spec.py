"""The shape of a GLM-5 family model (`glm_moe_dsa`), read once from `config.json`.

Owns the meaning of the configuration: which keys count, which traps to avoid, what is refused. Must not know tensors,
files or devices. Called by the loader, the memory plan, the quantiser and the model builder; nothing else reads the
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

IndexerKind = Literal["full", "shared"]

MODEL_TYPE = "glm_moe_dsa"

_REFUSED = {
    "deepseek_v32": "DeepSeek-V3.2 differs in rotary layout, YaRN scaling and grouped routing",
    "deepseek_v3": "DeepSeek-V3 has no sparse-attention indexer",
    "deepseek_v4": "DeepSeek-V4 is another architecture",
    "glm5_next": "GLM-5.3-Flash mixes linear attention, pooled index keys and residual streams",
    "glm4_moe": "GLM-4.5 to 4.7 use grouped-query attention",
}


class SpecError(ValueError):
    """A configuration that Legato cannot serve. `field` is the key of `config.json` at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"config.json: {field}: {message}")
        self.field = field


@dataclass(frozen=True)
class ModelSpec:
    """Every dimension and constant of the forward pass.

    `num_layers` counts the decoder layers only; the MTP layer, when declared (`has_mtp`), is stored as layer
    `num_layers`, always has its own indexer and a sparse MLP. `indexer_kinds[i]` says whether layer i runs its own
    indexer or reuses the nearest full layer's selection. `latent_eps` is the epsilon of the two norms inside the latent
    projections.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_intermediate: int
    expert_intermediate: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    first_dense: int
    routed_scale: float
    rms_eps: float
    latent_eps: float
    rope_theta: float
    index_topk: int
    index_heads: int
    index_dim: int
    index_rope_interleaved: bool
    indexer_kinds: tuple[IndexerKind, ...]
    has_mtp: bool
    max_position: int
    eos_ids: tuple[int, ...]

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: normalised latent (C), then rotated rope key (R)."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        """Width of one query or key head, N + R. Never the configuration's `head_dim`, which means something else."""
        return self.nope_dim + self.rope_dim

    @property
    def index_rotation(self) -> Literal["interleaved", "half"]:
        """Which numbers of an index key or query turn together."""
        return "interleaved" if self.index_rope_interleaved else "half"

    @property
    def num_full(self) -> int:
        """Decoder layers that run their own indexer (the MTP layer is not counted)."""
        return self.indexer_kinds.count("full")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Of every decoder layer "dense" or "sparse", and its kind of indexer: those of one kind do the same work."""
        mlps = ("dense" if self.is_dense(layer) else "sparse" for layer in range(self.num_layers))
        return tuple(f"{mlp}, {indexer}" for mlp, indexer in zip(mlps, self.indexer_kinds, strict=True))

    @property
    def attention_scale(self) -> float:
        """Softmax scale, (N + R)^-1/2 in the absorbed form too."""
        return self.qk_dim**-0.5

    def is_dense(self, layer: int) -> bool:
        """True for the leading layers with a dense MLP."""
        return layer < self.first_dense

    def is_full(self, layer: int) -> bool:
        """True where the layer has its own indexer; the MTP layer always does."""
        return layer >= self.num_layers or self.indexer_kinds[layer] == "full"

    @staticmethod
    def from_config(config: Mapping[str, Any], name: str = "") -> ModelSpec:
        """Reads a parsed `config.json`.

        `name` labels the model in messages (default: the configuration's `_name_or_path`, then the model type).
        Raises `SpecError`, naming the field, for another architecture, a missing or ill-typed key, or a variant that is
        not implemented.
        """
        _refuse_other_architectures(config)
        _refuse_variants(config)
        read = _Reader(config)
        num_layers = read.positive("num_hidden_layers")
        nope_dim, rope_dim = read.positive("qk_nope_head_dim"), read.positive("qk_rope_head_dim")
        if config.get("qk_head_dim") not in (None, nope_dim + rope_dim):
            raise SpecError(
                "qk_head_dim",
                f"expected {nope_dim} + {rope_dim} = {nope_dim + rope_dim}, found {config['qk_head_dim']}",
            )
        if rope_dim % 2:
            raise SpecError("qk_rope_head_dim", f"expected an even number, found {rope_dim}")
        num_experts, experts_per_token = read.positive("n_routed_experts"), read.positive("num_experts_per_tok")
        if config.get("num_experts") not in (None, num_experts):
            raise SpecError(
                "num_experts", f"disagrees with n_routed_experts = {num_experts}: found {config['num_experts']}"
            )
        if experts_per_token > num_experts:
            raise SpecError(
                "num_experts_per_tok", f"expected at most n_routed_experts = {num_experts}, found {experts_per_token}"
            )
        rms_eps = read.number("rms_norm_eps")
        return ModelSpec(
            name=name or str(config.get("_name_or_path") or MODEL_TYPE),
            vocab_size=read.positive("vocab_size"),
            hidden_size=read.positive("hidden_size"),
            num_layers=num_layers,
            num_heads=read.positive("num_attention_heads"),
            q_lora_rank=read.positive("q_lora_rank"),
            kv_lora_rank=read.positive("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            v_dim=read.positive("v_head_dim"),
            dense_intermediate=read.positive("intermediate_size"),
            expert_intermediate=read.positive("moe_intermediate_size"),
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            num_shared_experts=read.count("n_shared_experts"),
            first_dense=_first_dense(config, read, num_layers),
            routed_scale=read.number("routed_scaling_factor"),
            rms_eps=rms_eps,
            latent_eps=rms_eps,
            rope_theta=_rope_theta(config),
            index_topk=read.positive("index_topk"),
            index_heads=read.positive("index_n_heads"),
            index_dim=_index_dim(read, rope_dim),
            index_rope_interleaved=bool(config.get("indexer_rope_interleave", False)),
            indexer_kinds=_indexer_kinds(config, num_layers),
            has_mtp=_has_mtp(config),
            max_position=read.positive("max_position_embeddings"),
            eos_ids=_token_ids(config, "eos_token_id"),
        )


class _Reader:
    """Typed access to the configuration with errors that name the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def count(self, field: str) -> int:
        value = self._config.get(field)
        if value is None:
            raise SpecError(field, "missing; the model cannot be built without it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SpecError(field, f"expected a whole number >= 0, found {value!r}")
        return value

    def positive(self, field: str) -> int:
        value = self.count(field)
        if value == 0:
            raise SpecError(field, "expected a whole number >= 1, found 0")
        return value

    def number(self, field: str) -> float:
        return _positive_number(self._config.get(field), field)


def _positive_number(value: object, field: str) -> float:
    if value is None:
        raise SpecError(field, "missing; the model cannot be built without it")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise SpecError(field, f"expected a finite number > 0, found {value!r}")
    return float(value)


def _refuse_other_architectures(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type == MODEL_TYPE:
        return
    if model_type is None:
        raise SpecError("model_type", f"missing; Legato serves {MODEL_TYPE!r} (GLM-5, 5.1, 5.2, 5.3) only")
    reason = _REFUSED.get(str(model_type), "the architecture is not implemented")
    raise SpecError(
        "model_type",
        f"{model_type!r} is not supported: {reason}. Legato serves {MODEL_TYPE!r} (GLM-5, 5.1, 5.2, 5.3) only",
    )


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Keys whose other values would change the mathematics in silence. Absent means the family's own value."""
    required: dict[str, object] = {
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "moe_router_dtype": "float32",
    }
    for field, value in required.items():
        found = config.get(field)
        if found is not None and found != value:
            raise SpecError(field, f"only {value!r} is implemented, found {found!r}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise SpecError("num_key_value_heads", f"expected num_attention_heads = {heads}, found {kv_heads}")


def _rope_theta(config: Mapping[str, Any]) -> float:
    """`rope_parameters.rope_theta`, or the flat key of older exports. There is no default: a wrong theta fails in
    silence."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise SpecError("rope_parameters", f"expected an object, found {nested!r}")
    parameters = cast("Mapping[str, object]", nested)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise SpecError("rope_parameters.rope_type", f"only 'default' is implemented, found {kind!r}")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return _positive_number(theta, "rope_parameters.rope_theta")


def _index_dim(read: _Reader, rope_dim: int) -> int:
    index_dim = read.positive("index_head_dim")
    if index_dim < rope_dim:
        raise SpecError("index_head_dim", f"expected at least qk_rope_head_dim = {rope_dim}, found {index_dim}")
    return index_dim


def _first_dense(config: Mapping[str, Any], read: _Reader, num_layers: int) -> int:
    """Leading dense layers, from `mlp_layer_types` or `first_k_dense_replace`; the two must agree when both are
    present."""
    types = config.get("mlp_layer_types")
    if types is None:
        return min(read.count("first_k_dense_replace"), num_layers)
    kinds = _strings(types, "mlp_layer_types")
    if len(kinds) != num_layers:
        raise SpecError("mlp_layer_types", f"expected {num_layers} entries (num_hidden_layers), found {len(kinds)}")
    first = kinds.index("sparse") if "sparse" in kinds else num_layers
    if kinds != ["dense"] * first + ["sparse"] * (num_layers - first):
        raise SpecError("mlp_layer_types", "expected 'dense' entries followed by 'sparse' entries only")
    declared = config.get("first_k_dense_replace")
    if declared is not None and min(int(declared), num_layers) != first:
        raise SpecError("first_k_dense_replace", f"mlp_layer_types has {first} dense layers, found {declared}")
    return first


def _indexer_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[IndexerKind, ...]:
    """Full or shared per layer: `indexer_types`, else `index_topk_pattern`, else the schedule.

    Schedule: layer i is full iff max(i - offset + 1, 0) mod freq == 0, with offset 2 and freq 1 by default (every layer
    full: GLM-5).
    Source: configuration_glm_moe_dsa.py of transformers 5.24.
    """
    field, names = "indexer_types", config.get("indexer_types")
    if names is None and (pattern := config.get("index_topk_pattern")) is not None:
        field = "index_topk_pattern"
        names = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if names is None:
        field = "index_topk_freq"
        freq, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
        offset = 2 if offset is None else offset
        if not isinstance(freq, int) or not isinstance(offset, int) or freq < 1:
            raise SpecError(
                field, f"expected whole numbers, freq >= 1; found freq {freq!r}, index_skip_topk_offset {offset!r}"
            )
        names = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)]
    kinds = _strings(names, field)
    if len(kinds) != num_layers:
        raise SpecError(field, f"expected {num_layers} entries (num_hidden_layers), found {len(kinds)}")
    for layer, kind in enumerate(kinds):
        if kind not in ("full", "shared"):
            raise SpecError(field, f"layer {layer}: expected 'full' or 'shared', found {kind!r}")
    if kinds[0] == "shared":
        raise SpecError(field, "layer 0 is 'shared', but there is no earlier layer whose selection it could reuse")
    return tuple(cast("IndexerKind", kind) for kind in kinds)


def _has_mtp(config: Mapping[str, Any]) -> bool:
    declared = config.get("num_nextn_predict_layers") or 0
    if declared not in (0, 1):
        raise SpecError("num_nextn_predict_layers", f"expected 0 or 1, found {declared!r}")
    return declared == 1


def _token_ids(config: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = config.get(field)
    if value is None:
        return ()
    ids = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise SpecError(field, f"expected a token id or a list of them, found {value!r}")
    return tuple(cast("Sequence[int]", ids))


def _strings(value: object, field: str) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise SpecError(field, f"expected a list of names, found {value!r}")
    return [str(entry) for entry in cast("Sequence[object]", value)]
