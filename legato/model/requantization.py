"""What is quantised at load beyond the checkpoint's own formats: drafts (`lean`), and the target's dense weights.

Owns which of the target's weights and into what. Unlike lean drafts this changes the model: tokens may change. Must not know
files. Called by `legato.model.weights`; the choice is the engine's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from legato.model.lean import DraftWeights, lean_formats
from legato.model.names import Group, Kind, expected
from legato.model.spec import ModelSpec
from legato.quant.dense import DenseWeight
from legato.quant.formats import Format
from legato.quant.fp8_block import quantize_fp8_block
from legato.quant.weight import Weight

Finish = Callable[[Sequence[str], Weight], Weight]
"""What becomes of a weight of the named modules, after they were joined."""


class DenseFormat(Enum):
    """STORED: as the checkpoint has them. FP8: those that it has unquantised in e4m3 with one scale per 128 x 128."""

    STORED = "stored"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Requantization:
    """What is quantised at load."""

    drafts: DraftWeights = DraftWeights.STORED
    dense: DenseFormat = DenseFormat.STORED

    def formats(self, formats: Mapping[str, Format], spec: ModelSpec) -> dict[str, Format]:
        """The formats that linears are kept in, by name; `formats`: of the checkpoint."""
        found = dict(formats) if self.dense is DenseFormat.STORED else _in_fp8(formats, spec)
        return lean_formats(found, spec, self.drafts)


AS_STORED = Requantization()
_GROUPS = (Group.ATTENTION, Group.INDEXER, Group.DENSE_MLP, Group.SHARED_EXPERT)
_KEPT = ("kv_b_proj", "eh_proj")
"""Read as plain matrices per head; and the MTP layer's input, which is the drafts' business."""


def unchanged(modules: Sequence[str], weight: Weight) -> Weight:
    """The weight itself."""
    del modules
    return weight


def finish_of(dense: DenseFormat, formats: Mapping[str, Format], dequantized: torch.dtype | None = None) -> Finish:
    """For FP8, quantises weights whose modules are all dense in the checkpoint (`formats`: of modules by name); others stay.

    `dequantized`: the type to which they are brought back at once, where no weight is kept quantised; their values are then
    those of FP8.
    """
    if dense is DenseFormat.STORED:
        return unchanged

    def finish(modules: Sequence[str], weight: Weight) -> Weight:
        if not isinstance(weight, DenseWeight) or any(formats[module] is not Format.DENSE for module in modules):
            return weight
        quantized = quantize_fp8_block(weight.tensor)
        return quantized if dequantized is None else DenseWeight(quantized.dequantize(dequantized))

    return finish


def _in_fp8(formats: Mapping[str, Format], spec: ModelSpec) -> dict[str, Format]:
    """A join of dense and quantised modules, which stays as it is, is not looked at: no release has one."""
    found = dict(formats)
    for entry in expected(spec):
        is_one = entry.kind is Kind.LINEAR and entry.group in _GROUPS and not entry.name.endswith(_KEPT)
        if is_one and formats.get(entry.name) is Format.DENSE:
            found[entry.name] = Format.FP8_BLOCK
    return found
