"""How the partial sums of a sharded model meet: the protocol that the layers see, and the communicator of a single rank.

Owns what layers may ask of other ranks. Must not know layers, weights or how ranks were started. Passed down by the
runtime; called by `legato.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from legato.ops import add_rms_norm


class Communicator(Protocol):
    """The ranks of one model. Every rank makes the same calls in the same order, with shapes of its own share."""

    @property
    def rank(self) -> int:
        """Which of the ranks this is, from 0."""
        ...

    @property
    def num_ranks(self) -> int: ...

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """h = residual + the sum of all ranks' `partial`, and rms_norm(h, weight, eps): both [T, D], the same bits on
        every rank."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in x's shape, the same bits on every rank."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' `x` side by side along `dim`, in the order of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A model that is not sharded."""

    rank: int = 0
    num_ranks: int = 1

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(residual, partial, weight, eps)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x
