"""Experts as the bound implementation keeps them: packed once, at load, and nothing else of them resident.

Owns `keep`, which says what is kept, and `PackedExperts`. Must not know formats or how they are packed. Called by the loader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from legato.ops.op import REFERENCE, Op
from legato.quant.dense import DenseWeight
from legato.quant.formats import Format
from legato.quant.fp8_block import Fp8BlockWeight
from legato.quant.weight import Experts, Weight


@dataclass(frozen=True)
class PackedExperts:
    """The arguments of an op of experts after ids and weights, as its `pack` made them; a shared expert may be the last of them,
    in so many bytes."""

    format: Format
    num_experts: int
    op: Op[..., torch.Tensor]
    tensors: tuple[Any, ...]
    shared_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return _nbytes(self.tensors)

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return self.tensors

    def moe(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.op(x, ids, weights, *self.tensors)

    def dequantize(self, dtype: torch.dtype) -> Experts:
        """Raises TypeError: what was packed cannot be taken apart again."""
        raise TypeError(f"packed experts in format {self.format.value} are not dequantised: do it before packing")


def keep(experts: Experts, shared: tuple[Weight, Weight] | None) -> tuple[Experts, bool]:
    """The experts to keep, and whether the shared one (gate_up, down) is among them.

    Where the reference is bound both stay as they are: it reads weights as stored. Elsewhere the experts are packed, a shared
    expert that is dense or in FP8 blocks with them, and the originals can go.
    """
    if experts.op.bound.target == REFERENCE:
        return experts, False
    inside: tuple[torch.Tensor, ...] = ()
    if shared is not None:
        gate_up, down = shared
        if isinstance(gate_up, DenseWeight) and isinstance(down, DenseWeight):
            inside = (gate_up.tensor, down.tensor)
        elif isinstance(gate_up, Fp8BlockWeight) and isinstance(down, Fp8BlockWeight):
            inside = (gate_up.weight, down.weight, gate_up.scale_inv, down.scale_inv)
    packed = tuple(experts.op.pack(*experts.stored, *inside))
    of_shared = _nbytes(packed[len(experts.stored) :])
    return PackedExperts(experts.format, experts.num_experts, experts.op, packed, of_shared), bool(inside)


def _nbytes(tensors: tuple[Any, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
