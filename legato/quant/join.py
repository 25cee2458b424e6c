"""Joining weights that share their input into one (q_a with kv_a, gate with up), so that the model makes one call.

Owns `concatenate` and the fallback for what cannot be one weight. Called by the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from legato.quant.dense import DenseWeight
from legato.quant.formats import BLOCK, Format
from legato.quant.fp8_block import Fp8BlockWeight
from legato.quant.int4 import Int4Weight
from legato.quant.nvfp4 import Nvfp4Weight
from legato.quant.weight import PlainProducts, ScaleFault, Weight


@dataclass(frozen=True)
class StackedWeight(PlainProducts):
    """Weights of different formats, or not aligned to blocks, over the same input; `linear` joins their outputs."""

    weights: tuple[Weight, ...]

    @property
    def format(self) -> Format:
        return self.weights[0].format

    @property
    def out_features(self) -> int:
        return sum(weight.out_features for weight in self.weights)

    @property
    def in_features(self) -> int:
        return self.weights[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def linear(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        start = 0
        for weight in self.weights:
            end = start + weight.out_features
            outputs.append(weight.linear(x, None if residual is None else residual[..., start:end].contiguous()))
            start = end
        return torch.cat(outputs, dim=-1)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([weight.dequantize(dtype) for weight in self.weights])

    def to(self, device: torch.device) -> StackedWeight:
        return StackedWeight(tuple(weight.to(device) for weight in self.weights))

    def fault(self) -> ScaleFault | None:
        return next((found for weight in self.weights if (found := weight.fault()) is not None), None)


def concatenate(weights: Sequence[Weight]) -> Weight:
    """Rows of all weights, in order. One weight of their format where they share it (for FP8: where every weight but
    the last ends on a block), otherwise a `StackedWeight` of as few as neighbours can be made. Values never change.
    Raises `ValueError` when the inputs differ in width."""
    if len({weight.in_features for weight in weights}) != 1:
        raise ValueError(f"weights over one input differ in width: {[weight.in_features for weight in weights]}")
    joined: list[Weight] = []
    rest = list(weights)
    while rest:
        length = next(n for n in range(len(rest), 0, -1) if n == 1 or _one_format(rest[:n]))
        joined.append(_joined(rest[:length]))
        rest = rest[length:]
    return joined[0] if len(joined) == 1 else StackedWeight(tuple(joined))


def _one_format(weights: Sequence[Weight]) -> bool:
    """Whether one weight can hold these."""
    if all(isinstance(weight, DenseWeight) for weight in weights):
        return len({weight.tensor.dtype for weight in cast("Sequence[DenseWeight]", weights)}) == 1
    if all(isinstance(weight, Fp8BlockWeight) for weight in weights):
        return all(weight.out_features % BLOCK == 0 for weight in weights[:-1])
    if all(isinstance(weight, Int4Weight) for weight in weights):
        return len({weight.scale.dtype for weight in cast("Sequence[Int4Weight]", weights)}) == 1
    return all(isinstance(weight, Nvfp4Weight) for weight in weights)


def _joined(weights: Sequence[Weight]) -> Weight:
    if len(weights) == 1:
        return weights[0]
    if isinstance(weights[0], DenseWeight):
        return DenseWeight(torch.cat([weight.tensor for weight in cast("Sequence[DenseWeight]", weights)]))
    if isinstance(weights[0], Fp8BlockWeight):
        blocks = cast("Sequence[Fp8BlockWeight]", weights)
        joined = torch.cat([weight.weight.view(torch.uint8) for weight in blocks]).view(torch.float8_e4m3fn)
        return Fp8BlockWeight(joined, torch.cat([weight.scale_inv for weight in blocks]))
    if isinstance(weights[0], Nvfp4Weight):
        nvfp4 = cast("Sequence[Nvfp4Weight]", weights)
        scale = torch.cat([weight.scale.view(torch.uint8) for weight in nvfp4]).view(torch.float8_e4m3fn)
        scale_2 = torch.cat([weight.scale_2 for weight in nvfp4])
        return Nvfp4Weight(torch.cat([weight.packed for weight in nvfp4]), scale, scale_2)
    int4 = cast("Sequence[Int4Weight]", weights)
    return Int4Weight(torch.cat([weight.packed for weight in int4]), torch.cat([weight.scale for weight in int4]))
