"""Drafts from fewer bits: the MTP layer's large weights quantised again at load.

Owns which weights and into what. The target verifies every draft, so no token changes; how many drafts it accepts may. Must not
know files or layers. Called by `legato.model.weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import torch

from legato.model.names import layer_prefix
from legato.model.reader import WeightSource
from legato.model.spec import ModelSpec
from legato.quant.dense import DenseExperts, DenseWeight, Triple
from legato.quant.formats import NVFP4_GROUP, Format
from legato.quant.fp8_block import quantize_fp8_block
from legato.quant.nvfp4 import Nvfp4Experts, quantize_nvfp4
from legato.quant.weight import Experts, Weight


class DraftWeights(Enum):
    """STORED: the MTP layer as the checkpoint has it. LEAN: its routed experts in NVFP4; its input projection and the copy of
    the output head that drafts use in FP8 blocks."""

    STORED = "stored"
    LEAN = "lean"


class LeanSource:
    """A source of weights whose MTP layer is lean; everything else comes through unchanged."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self.dtype = source.dtype
        self._source, self._mtp = source, layer_prefix(spec.num_layers)

    def float_tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._source.float_tensor(name, dtype)

    def linear(self, module: str) -> Weight:
        weight = self._source.linear(module)
        return lean_linear(weight) if module == f"{self._mtp}eh_proj" else weight

    def joined(self, modules: list[str]) -> Weight:
        return self._source.joined(modules)

    def dense(self, module: str, dtype: torch.dtype) -> torch.Tensor:
        return self._source.dense(module, dtype)

    def head(self, module: str, num_rows: int) -> Weight:
        return self._source.head(module, num_rows)

    def experts(self, prefix: str, num_experts: int) -> Experts:
        experts = self._source.experts(prefix, num_experts)
        return lean_experts(experts) if prefix.startswith(self._mtp) else experts


def lean_formats(formats: Mapping[str, Format], spec: ModelSpec) -> dict[str, Format]:
    """The formats of linears by name, those of a lean MTP layer in place of the stored ones."""
    mtp = layer_prefix(spec.num_layers)
    found = dict(formats)
    for name, stored in formats.items():
        if name.startswith(f"{mtp}mlp.experts.") and stored in (Format.DENSE, Format.FP8_BLOCK):
            found[name] = Format.NVFP4
        elif name == f"{mtp}eh_proj" and stored is Format.DENSE:
            found[name] = Format.FP8_BLOCK
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
