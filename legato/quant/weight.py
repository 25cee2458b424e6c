"""What the model sees of a weight: it can be applied, measured and spelled out, whatever its format.

Owns the two protocols, and what weights without products of their own, and stacks of experts, have in common. Must not know
formats or how an op computes. Implemented by the format modules beside it; used by the loader and the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from legato.ops.op import Op
from legato.ops.pointwise import rms_norm, swiglu
from legato.ops.sample import greedy_keys
from legato.quant.formats import Format


@dataclass(frozen=True)
class ScaleFault:
    """A scale that cannot be used: which one (`scale_inv`, `scale` or `scale_2`), and what was found where."""

    part: str
    found: str


class Weight(Protocol):
    """One linear weight [N, K], without bias."""

    @property
    def format(self) -> Format: ...

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Resident bytes, scales included."""
        ...

    def linear(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x[T,K] @ W.T (+ residual[T,N]) -> [T,N] in x.dtype."""
        ...

    def linear_normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """rms_norm(x[T,K], norm[K], eps) @ W.T -> [T,N] in x.dtype: a product that norms its rows on the way in."""
        ...

    def linear_swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """swiglu(x[T,K] @ W.T) -> [T,N/2] in x.dtype, of a weight of gate rows, then up rows."""
        ...

    def best_keys(self, x: torch.Tensor, first: int, width: int) -> torch.Tensor:
        """Of each row of x[T,K] @ W.T the best of the first `width` outputs, numbered from `first` on: `greedy_keys`."""
        ...

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] in `dtype`: computed in float32 with one rounding per element, then cast once."""
        ...

    def to(self, device: torch.device) -> Weight:
        """The same weight on a device (itself when it is there already)."""
        ...

    def fault(self) -> ScaleFault | None:
        """What is wrong with the values of the scales (NaN, infinite, negative, zero), or None."""
        ...


class PlainProducts(ABC):
    """A weight for which no op norms, gates or chooses in its product: those follow or come before `linear`."""

    @abstractmethod
    def linear(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor: ...

    def linear_normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return self.linear(rms_norm(x, norm, eps))

    def linear_swiglu(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(self.linear(x))

    def best_keys(self, x: torch.Tensor, first: int, width: int) -> torch.Tensor:
        return greedy_keys(self.linear(x)[:, :width], first)


class Experts(Protocol):
    """The routed experts of one layer: w13[E, 2F, D] (gate rows, then up rows) and w2[E, D, F], in one format."""

    @property
    def format(self) -> Format: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def op(self) -> Op[..., torch.Tensor]:
        """The product of experts in this format."""
        ...

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """The op's arguments after ids and weights."""
        ...

    @property
    def nbytes(self) -> int:
        """Resident bytes, scales included."""
        ...

    def moe(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """sum_a weights[T,A] * expert[ids[T,A]](x[T,D]) -> [T,D]; ids < 0 contribute nothing."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Experts:
        """The same experts as dense tensors (`DenseExperts`) in `dtype`."""
        ...


@dataclass(frozen=True)
class StackedExperts(ABC):
    """Experts whose fields are the arguments of their format's op after ids and weights, in its order, each [E, ...]."""

    @property
    @abstractmethod
    def op(self) -> Op[..., torch.Tensor]: ...

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def num_experts(self) -> int:
        return self.stored[0].shape[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored)

    def moe(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.op(x, ids, weights, *self.stored)
