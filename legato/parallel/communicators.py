"""How ranks exchange: the protocol that the layers call, and the communicator of a rank that is alone.

Owns what the model may ask of other ranks. Must not know layers, formats or how ranks were started. Passed down by the
runtime; called by `legato.model`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from legato.ops import add_rms_norm, best_of_keys
from legato.parallel.mesh import ONE_RANK, Mesh


class Communicator(Protocol):
    """What a rank's layers ask of the group. Every rank makes the same calls in the same order, and gets the same bits."""

    @property
    def mesh(self) -> Mesh:
        """Who this rank is."""
        ...

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """h = residual + the sum of all ranks' `partial`, and rms_norm(h, weight, eps): both [T, D]."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' `partial`, in its shape, added in the order of ranks."""
        ...

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        """All ranks' shards side by side along `dim`, in the order of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """One rank that holds the whole model: partial sums are sums, shards are whole."""

    mesh: Mesh = ONE_RANK

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(residual, partial, weight, eps)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        return shard


ALONE = SingleRank()
"""The communicator of a model that is not sharded."""


def side_by_side(gathered: Tensor, dim: int) -> Tensor:
    """All ranks' shards [N, ...] side by side along `dim` of a shard; as they lie, if nothing is outside of that."""
    shape = gathered.shape[1:]
    outer, rest = shape[: dim % len(shape)], shape[dim % len(shape) + 1 :]
    return gathered.view(*outer, -1, *rest) if outer.numel() == 1 else torch.cat(gathered.unbind(0), dim)


def best_token(keys: Callable[[int, int], Tensor], width: int, vocab_size: int, communicator: Communicator) -> Tensor:
    """[T] int64 tokens with the highest logit, ties to the lowest id, of a vocabulary of which each rank has `width`, the last
    ones padded. `keys(first, count)`: the rank's own best among `count` from `first` on, as `greedy_keys` has it. Exchanges
    eight bytes a row."""
    first = communicator.mesh.rank * width
    own = keys(first, max(0, min(width, vocab_size - first)))
    return best_of_keys(communicator.all_gather(own[None], 0))
