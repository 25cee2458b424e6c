"""Drafts from fewer bytes: the MTP layer's large weights made smaller at load, and what drafts choose among.

Owns which weights and into what. The target verifies every draft, so no token changes; how many drafts it accepts may. Must not
know files or layers. Called by `legato.model.weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

import torch

from legato.config import ConfigError
from legato.model.names import layer_prefix
from legato.model.reader import Residency, WeightSource
from legato.model.spec import ModelSpec
from legato.ops import rms_norm
from legato.parallel.mesh import Mesh
from legato.quant.dense import DenseExperts, DenseWeight, Triple
from legato.quant.formats import NVFP4_GROUP, Format, resident_bytes
from legato.quant.fp8_block import quantize_fp8_block
from legato.quant.nvfp4 import Nvfp4Experts, quantize_nvfp4
from legato.quant.weight import Experts, Weight

_TABLE_ROWS = 1 << 13
"""Tokens whose part of the table is made at once."""


class Saving(Enum):
    """EXPERTS: the MTP layer's routed experts in NVFP4. PROJECTION: its input projection (what is left of it as a matrix) in FP8
    blocks. TABLE: what the projection makes of a token's embedding, as a table over the vocabulary. SPLIT: the projection's rows
    split over the ranks. HEAD: the copy of the output head that drafts use in FP8 blocks."""

    EXPERTS = "experts"
    PROJECTION = "projection"
    TABLE = "table"
    SPLIT = "split"
    HEAD = "head"


@dataclass(frozen=True)
class DraftWeights:
    """What of the drafts' weights is made smaller, and the ids that drafts choose among (none: the whole vocabulary), besides
    a few that round their number up (see `draft_head`)."""

    savings: frozenset[Saving] = frozenset()
    vocabulary: tuple[int, ...] = ()

    STORED: ClassVar[DraftWeights]
    LEAN: ClassVar[DraftWeights]
    FASTEST: ClassVar[DraftWeights]
    """What brings most tokens per second where kernels read weights as stored; the measurements are in decision 13."""

    @classmethod
    def parse(cls, text: str) -> DraftWeights:
        """ "stored", "lean", or savings by name with commas between them; "vocabulary=N" for the N lowest ids, or
        "vocabulary=FILE" for those of a JSON array, may follow either.

        Raises:
            ConfigError: a word is none of these, or the file holds no such array.
        """
        savings: set[Saving] = set()
        vocabulary: tuple[int, ...] = ()
        named = {saving.value: frozenset((saving,)) for saving in Saving}
        named |= {"stored": cls.STORED.savings, "lean": cls.LEAN.savings}
        for word in text.split(","):
            name, _, value = word.strip().partition("=")
            if name == "vocabulary" and value.strip("0"):
                vocabulary = tuple(range(int(value))) if value.isdecimal() else _ids_in(Path(value))
            elif word.strip() in named:
                savings |= named[word.strip()]
            else:
                raise ConfigError(
                    f"draft weights: {word!r} is none of {', '.join(named)}, vocabulary=N, vocabulary=FILE"
                )
        return cls(frozenset(savings), vocabulary)


DraftWeights.STORED = DraftWeights()
DraftWeights.LEAN = DraftWeights(frozenset((Saving.EXPERTS, Saving.PROJECTION, Saving.HEAD)))
DraftWeights.FASTEST = DraftWeights(frozenset(Saving))


def settled(text: str, resident: Residency) -> str:
    """What `DraftWeights.parse` is to read where `text` is what was asked for: "auto" is the fastest where fewer bytes are less
    time, else as stored."""
    if text != "auto":
        return text
    return "lean,table,split" if resident is Residency.STORED else "stored"


def _ids_in(path: Path) -> tuple[int, ...]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft weights: vocabulary={path} cannot be read: {error}") from error
    if not isinstance(found, list) or not found or not all(isinstance(one, int) and one >= 0 for one in found):
        raise ConfigError(f"draft weights: vocabulary={path} is no JSON array of token ids")
    return tuple(sorted(set(found)))


class LeanSource:
    """A source of weights whose MTP layer has its experts in NVFP4; everything else comes through unchanged."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self.dtype = source.dtype
        self._source, self._mtp = source, layer_prefix(spec.num_layers)

    def float_tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._source.float_tensor(name, dtype)

    def linear(self, module: str) -> Weight:
        return self._source.linear(module)

    def joined(self, modules: list[str]) -> Weight:
        return self._source.joined(modules)

    def dense(self, module: str, dtype: torch.dtype) -> torch.Tensor:
        return self._source.dense(module, dtype)

    def head(self, module: str, num_rows: int) -> Weight:
        return self._source.head(module, num_rows)

    def rows(self, module: str, ids: tuple[int, ...]) -> Weight:
        return self._source.rows(module, ids)

    def experts(self, prefix: str, num_experts: int) -> Experts:
        experts = self._source.experts(prefix, num_experts)
        return lean_experts(experts) if prefix.startswith(self._mtp) else experts


@dataclass(frozen=True)
class DraftHead:
    """The output head of drafts: this rank's rows of it, and the ids [R] int64 of all ranks' rows in their order (None: those of
    the whole vocabulary)."""

    weight: Weight
    ids: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


def added_bytes(spec: ModelSpec, drafts: DraftWeights, ranks: int, itemsize: int) -> int:
    """Bytes that a rank's drafts take beside the checkpoint's weights: the table (`itemsize` bytes per element), and a head of
    their own. Where the projection or the head is quantised already they are fewer."""
    if not spec.has_mtp:
        return 0
    is_split = Saving.SPLIT in drafts.savings and spec.hidden_size % ranks == 0
    table = spec.vocab_size * spec.hidden_size * itemsize // (ranks if is_split else 1)
    rows = len(drafts.vocabulary) or spec.vocab_size
    rows = -(-rows // (ranks * _ROWS)) * _ROWS
    head = rows * spec.hidden_size * itemsize
    if Saving.HEAD in drafts.savings:
        head = resident_bytes(Format.FP8_BLOCK, rows, spec.hidden_size)
    has_head = Saving.HEAD in drafts.savings or drafts.vocabulary
    return (table if Saving.TABLE in drafts.savings else 0) + (head if has_head else 0)


def draft_head(
    source: WeightSource, head: Weight, spec: ModelSpec, drafts: DraftWeights, mesh: Mesh
) -> DraftHead | None:
    """The drafts' own head; None where they use the target's. Its rows divide evenly over the ranks: the lowest ids that are not
    listed fill it up, each once, since of two rows for one id it would be chance which one counts. Where there are too few of
    them, drafts choose among the whole vocabulary.

    Raises:
        ConfigError: an id is not in the vocabulary.
    """
    weight, ids = head, None
    if drafts.vocabulary:
        if drafts.vocabulary[-1] >= spec.vocab_size:
            raise ConfigError(f"draft weights: id {drafts.vocabulary[-1]} is not below {spec.vocab_size}")
        each = -(-len(drafts.vocabulary) // (mesh.size * _ROWS)) * _ROWS
        others = sorted(set(range(spec.vocab_size)).difference(drafts.vocabulary))
        filled = (*drafts.vocabulary, *others[: each * mesh.size - len(drafts.vocabulary)])
        if len(filled) == each * mesh.size:
            weight = source.rows("lm_head", filled[mesh.rank * each : (mesh.rank + 1) * each])
            ids = torch.tensor(filled, device=weight.dequantize(source.dtype).device)
    if Saving.HEAD in drafts.savings:
        weight = lean_linear(weight)
    return None if weight is head else DraftHead(weight, ids)


_ROWS = 64
"""Rows of a rank's part of a smaller head come in so many at a time, as kernels like them."""


@dataclass(frozen=True)
class InputProjection:
    """eh_proj [D', 2D] over [embedding ; hidden], or with a `table` [W, D'] of what it makes of each token's embedding, the
    matrix [D', D] over the hidden state alone. D' is D, or a rank's share of it."""

    weight: Weight
    table: torch.Tensor | None = None


def input_projection(
    weight: Weight, embed: torch.Tensor, enorm: torch.Tensor, eps: float, drafts: DraftWeights, mesh: Mesh
) -> InputProjection:
    """The projection with the savings that are asked for; one that is quantised already, or does not divide, stays whole."""
    if not isinstance(weight, DenseWeight):
        return InputProjection(weight)
    matrix, table = weight.tensor, None
    if Saving.SPLIT in drafts.savings and mesh.is_sharded and matrix.shape[0] % mesh.size == 0:
        share = mesh.share(matrix.shape[0])
        matrix = matrix[share.start : share.stop]
    if Saving.TABLE in drafts.savings:
        of_embedding, matrix = matrix.chunk(2, dim=1)
        table = torch.cat([rms_norm(some, enorm, eps) @ of_embedding.t() for some in embed.split(_TABLE_ROWS)])
    made: Weight = DenseWeight(matrix.contiguous())
    return InputProjection(lean_linear(made) if Saving.PROJECTION in drafts.savings else made, table)


def lean_formats(formats: Mapping[str, Format], spec: ModelSpec, drafts: DraftWeights) -> dict[str, Format]:
    """The formats of linears by name, those of the drafts' experts in place of the stored ones."""
    experts = f"{layer_prefix(spec.num_layers)}mlp.experts."
    found = dict(formats)
    if Saving.EXPERTS in drafts.savings:
        for name, stored in formats.items():
            if name.startswith(experts) and stored in (Format.DENSE, Format.FP8_BLOCK):
                found[name] = Format.NVFP4
    return found


def lean_linear(weight: Weight) -> Weight:
    """A dense weight in FP8 blocks; one that has fewer bits already as it is."""
    return quantize_fp8_block(weight.tensor) if isinstance(weight, DenseWeight) else weight


def lean_experts(experts: Experts) -> Experts:
    """Experts of 8 bits or more in NVFP4, quantised one by one; those whose widths its groups do not divide as they are."""
    if experts.format not in (Format.DENSE, Format.FP8_BLOCK):
        return experts
    dense = experts if isinstance(experts, DenseExperts) else experts.dequantize(torch.bfloat16)
    assert isinstance(dense, DenseExperts), "dequantised experts are dense"
    width, hidden = dense.w2.shape[2], dense.w2.shape[1]
    if width % NVFP4_GROUP or hidden % NVFP4_GROUP:
        return experts

    def triples() -> Iterator[Triple]:
        for gate_up, down in zip(dense.w13, dense.w2, strict=True):
            yield quantize_nvfp4(gate_up[:width]), quantize_nvfp4(gate_up[width:]), quantize_nvfp4(down)

    return Nvfp4Experts.collect(triples(), dense.num_experts, dense.w2.device)
