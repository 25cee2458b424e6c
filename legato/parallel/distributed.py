"""The communicator over `torch.distributed`: gloo between processes on CPUs, NCCL between GPUs.

Owns the order in which ranks' partial sums are added. Must not know how ranks were started: the process group exists before it.
Called by the model through the protocol of `communicators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from legato.ops import all_reduce_add_norm
from legato.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class DistributedRank:
    """One rank of a process group; it is the `Exchange` of `all_reduce_add_norm` too.

    Sums are gathered and added here, in float32 and in the order of ranks: the library's own all-reduce promises the same bits on
    every rank at best, and another order at another size. Raises `ValueError` where the group's size or rank is not the mesh's.
    """

    mesh: Mesh
    group: distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        found = Mesh(distributed.get_rank(self.group), distributed.get_world_size(self.group))
        if found != self.mesh:
            raise ValueError(f"the process group says {found}, the weights were cut for {self.mesh}")

    def gather(self, partial: Tensor) -> Sequence[Tensor]:
        """Every rank's tensor, in the order of ranks."""
        partial = partial.contiguous()
        parts = [torch.empty_like(partial) for _ in range(self.mesh.size)]
        distributed.all_gather(parts, partial, group=self.group)
        return parts

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return all_reduce_add_norm(partial, residual, weight, eps, self)

    def all_reduce(self, partial: Tensor) -> Tensor:
        first, *others = self.gather(partial)
        total = first.float()
        for other in others:
            total = total + other.float()
        return total.to(partial.dtype)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        return torch.cat(list(self.gather(shard)), dim)
