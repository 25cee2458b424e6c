"""The communicator of one rank that runs without the others: for timing a rank's share of the work on one device.

Owns the count of exchanges that a group would have made. Must not be used to generate: what comes out is one rank's partial
result. Called by `legato.bench.share`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from legato.ops import add_rms_norm, all_gather
from legato.parallel.communicators import side_by_side
from legato.parallel.mesh import Mesh


@dataclass(slots=True)
class Exchanges:
    """Calls since the last `clear`, with the bytes that this rank would have sent."""

    sums: int = 0
    gathers: int = 0
    num_bytes: int = 0

    def clear(self) -> None:
        """Starts the count anew."""
        self.sums = self.gathers = self.num_bytes = 0


@dataclass(frozen=True, slots=True)
class LoopBack:
    """Rank `mesh.rank` of a group that is not there. Sums are its own part; gathered shards are its own shard, repeated (without
    a copy where it is one entry of the dimension)."""

    mesh: Mesh
    exchanges: Exchanges = field(default_factory=Exchanges)

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self._note(partial)
        return add_rms_norm(residual, partial, weight, eps)

    def all_reduce(self, partial: Tensor) -> Tensor:
        self._note(partial)
        return partial

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        self.exchanges.gathers += 1
        self.exchanges.num_bytes += shard.nbytes
        if shard.shape[dim] == 1:
            sizes = [-1] * shard.dim()
            sizes[dim] = self.mesh.size
            return shard.expand(sizes)
        return side_by_side(all_gather(shard, self), dim)

    def gather(self, shard: Tensor) -> Sequence[Tensor]:
        """The own shard in every rank's place."""
        return [shard] * self.mesh.size

    def _note(self, partial: Tensor) -> None:
        self.exchanges.sums += 1
        self.exchanges.num_bytes += partial.nbytes
