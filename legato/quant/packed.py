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
from legato.quant.weight import Experts, Weight


@dataclass(frozen=True)
class PackedExperts:
    """The arguments of an op of experts after ids and weights, as its `pack` made them; a shared expert may be the last two."""

    format: Format
    num_experts: int
    op: Op[..., torch.Tensor]
    tensors: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if isinstance(tensor, torch.Tensor))

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

    Where the reference is bound both stay as they are: it reads weights as stored. Elsewhere the experts are packed, a
    dense shared expert with them, and the originals can go.
    """
    if experts.op.bound.target == REFERENCE:
        return experts, False
    inside: tuple[torch.Tensor, ...] = ()
    if shared is not None and isinstance(shared[0], DenseWeight) and isinstance(shared[1], DenseWeight):
        inside = (shared[0].tensor, shared[1].tensor)
    packed = experts.op.pack(*experts.stored, *inside)
    return PackedExperts(experts.format, experts.num_experts, experts.op, tuple(packed)), bool(inside)
