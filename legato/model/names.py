"""The one table of GLM-5 tensors: name in the checkpoint, name here, shape, kind and how it splits over ranks.

Owns what must be in a checkpoint, derived from a `ModelSpec` alone. Must not read files. Called by the inventory (what
is missing or misshapen), the loader, the memory plan and the quantiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from legato.model.spec import ModelSpec


class Kind(Enum):
    """LINEAR: a module whose weight may be in any format. FLOAT: one tensor, always floating point."""

    LINEAR = "linear"
    FLOAT = "float"


class Split(Enum):
    """How a tensor divides over tensor-parallel ranks."""

    REPLICATED = "replicated"
    ROWS = "rows"
    COLUMNS = "columns"


class Group(Enum):
    """Where the bytes go in the memory plan."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE_MLP = "dense MLP"
    ROUTER = "router"
    EXPERTS = "routed experts"
    SHARED_EXPERT = "shared expert"
    NORMS = "norms"
    HEAD = "output head"


@dataclass(frozen=True)
class Row:
    """One line of the table. `shape` is written in the letters of docs/shapes.md; `ours` is the field of
    `legato.model.weights`."""

    name: str
    ours: str
    kind: Kind
    shape: tuple[str, ...]
    split: Split
    group: Group


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that must be present. For a LINEAR, `name` is the module: the parts add `.weight`, `.weight_scale`,
    ..."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    split: Split
    group: Group
    layer: int | None


LINEAR, FLOAT = Kind.LINEAR, Kind.FLOAT
_ALL, _ROWS, _COLUMNS = Split.REPLICATED, Split.ROWS, Split.COLUMNS
_ATT, _IDX, _NORM, _EXP = Group.ATTENTION, Group.INDEXER, Group.NORMS, Group.EXPERTS

TRUNK = (
    Row("model.embed_tokens.weight", "embed", FLOAT, ("W", "D"), _ALL, Group.EMBEDDING),
    Row("model.norm.weight", "norm", FLOAT, ("D",), _ALL, _NORM),
    Row("lm_head", "lm_head", LINEAR, ("W", "D"), _ROWS, Group.HEAD),
)
ATTENTION = (
    Row("input_layernorm.weight", "input_norm", FLOAT, ("D",), _ALL, _NORM),
    Row("self_attn.q_a_proj", "attention.qkv[:Q]", LINEAR, ("Q", "D"), _ALL, _ATT),
    Row("self_attn.kv_a_proj_with_mqa", "attention.qkv[Q:]", LINEAR, ("C+R", "D"), _ALL, _ATT),
    Row("self_attn.q_a_layernorm.weight", "attention.q_norm", FLOAT, ("Q",), _ALL, _NORM),
    Row("self_attn.q_b_proj", "attention.q[:H(N+R)]", LINEAR, ("H(N+R)", "Q"), _ROWS, _ATT),
    Row("self_attn.kv_a_layernorm.weight", "attention.kv_norm", FLOAT, ("C",), _ALL, _NORM),
    Row("self_attn.kv_b_proj", "attention.kv_b", LINEAR, ("H(N+V)", "C"), _ROWS, _ATT),
    Row("self_attn.o_proj", "attention.o", LINEAR, ("D", "HV"), _COLUMNS, _ATT),
    Row("post_attention_layernorm.weight", "post_norm", FLOAT, ("D",), _ALL, _NORM),
)
INDEXER = (
    Row("self_attn.indexer.wq_b", "attention.q[H(N+R):]", LINEAR, ("IX", "Q"), _ALL, _IDX),
    Row("self_attn.indexer.wk", "attention.qkv[Q+C+R:]", LINEAR, ("X", "D"), _ALL, _IDX),
    Row("self_attn.indexer.k_norm.weight", "indexer.k_norm_weight", FLOAT, ("X",), _ALL, _IDX),
    Row("self_attn.indexer.k_norm.bias", "indexer.k_norm_bias", FLOAT, ("X",), _ALL, _IDX),
    Row("self_attn.indexer.weights_proj", "attention.qkv[Q+C+R+X:]", LINEAR, ("I", "D"), _ALL, _IDX),
)
DENSE_MLP = (
    Row("mlp.gate_proj", "mlp.gate_up[:F]", LINEAR, ("F0", "D"), _ROWS, Group.DENSE_MLP),
    Row("mlp.up_proj", "mlp.gate_up[F:]", LINEAR, ("F0", "D"), _ROWS, Group.DENSE_MLP),
    Row("mlp.down_proj", "mlp.down", LINEAR, ("D", "F0"), _COLUMNS, Group.DENSE_MLP),
)
ROUTER = (
    Row("mlp.gate", "mlp.gate", LINEAR, ("E", "D"), _ALL, Group.ROUTER),
    Row("mlp.gate.e_score_correction_bias", "mlp.bias", FLOAT, ("E",), _ALL, Group.ROUTER),
)
SHARED_EXPERT = (
    Row("mlp.shared_experts.gate_proj", "mlp.shared.gate_up[:F]", LINEAR, ("FS", "D"), _ROWS, Group.SHARED_EXPERT),
    Row("mlp.shared_experts.up_proj", "mlp.shared.gate_up[F:]", LINEAR, ("FS", "D"), _ROWS, Group.SHARED_EXPERT),
    Row("mlp.shared_experts.down_proj", "mlp.shared.down", LINEAR, ("D", "FS"), _COLUMNS, Group.SHARED_EXPERT),
)
EXPERT = (
    Row("mlp.experts.{expert}.gate_proj", "mlp.experts.w13[expert, :F]", LINEAR, ("F", "D"), _ROWS, _EXP),
    Row("mlp.experts.{expert}.up_proj", "mlp.experts.w13[expert, F:]", LINEAR, ("F", "D"), _ROWS, _EXP),
    Row("mlp.experts.{expert}.down_proj", "mlp.experts.w2[expert]", LINEAR, ("D", "F"), _COLUMNS, _EXP),
)
MTP = (
    Row("enorm.weight", "mtp.enorm", FLOAT, ("D",), _ALL, _NORM),
    Row("hnorm.weight", "mtp.hnorm", FLOAT, ("D",), _ALL, _NORM),
    Row("eh_proj", "mtp.eh_proj", LINEAR, ("D", "2D"), _ALL, _ATT),
    Row("shared_head.norm.weight", "mtp.norm", FLOAT, ("D",), _ALL, _NORM),
)


def dimensions(spec: ModelSpec) -> dict[str, int]:
    """The letters and products that the table uses, as numbers."""
    return {
        "W": spec.vocab_size,
        "D": spec.hidden_size,
        "2D": 2 * spec.hidden_size,
        "Q": spec.q_lora_rank,
        "C": spec.kv_lora_rank,
        "C+R": spec.latent_dim,
        "H(N+R)": spec.num_heads * spec.qk_dim,
        "H(N+V)": spec.num_heads * (spec.nope_dim + spec.v_dim),
        "HV": spec.num_heads * spec.v_dim,
        "I": spec.index_heads,
        "X": spec.index_dim,
        "IX": spec.index_heads * spec.index_dim,
        "F0": spec.dense_intermediate,
        "F": spec.expert_intermediate,
        "FS": spec.expert_intermediate * spec.num_shared_experts,
        "E": spec.num_experts,
    }


def layer_prefix(layer: int) -> str:
    """`model.layers.{layer}.`; the MTP layer is `num_layers`."""
    return f"model.layers.{layer}."


def layer_rows(spec: ModelSpec, layer: int) -> tuple[Row, ...]:
    """The lines that apply to a layer, experts not multiplied; `layer == num_layers` is the MTP layer."""
    rows = ATTENTION + (INDEXER if spec.is_full(layer) else ())
    if spec.is_dense(layer) and layer < spec.num_layers:
        return rows + DENSE_MLP
    rows += ROUTER + (SHARED_EXPERT if spec.num_shared_experts else ()) + EXPERT
    return rows + (MTP if layer == spec.num_layers else ())


@lru_cache(maxsize=2)
def expected(spec: ModelSpec) -> tuple[Expected, ...]:
    """Every tensor of the model, the MTP layer included when `spec.has_mtp`."""
    sizes = dimensions(spec)
    entries = [_expected(row, row.name, sizes, None) for row in TRUNK]
    for layer in range(spec.num_layers + int(spec.has_mtp)):
        for row in layer_rows(spec, layer):
            prefix = layer_prefix(layer) + row.name
            names = [prefix]
            if row.group is Group.EXPERTS:
                names = [prefix.format(expert=expert) for expert in range(spec.num_experts)]
            entries += [_expected(row, name, sizes, layer) for name in names]
    return tuple(entries)


def _expected(row: Row, name: str, sizes: dict[str, int], layer: int | None) -> Expected:
    return Expected(name, row.kind, tuple(sizes[letter] for letter in row.shape), row.split, row.group, layer)
