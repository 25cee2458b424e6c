"""Ranks of one tensor-parallel group: who a rank is (`mesh`), and how partial sums and shards become whole
(`communicators` for one rank and the protocol, `distributed`, `loopback`).

Knows ops and nothing above them. Called by `legato.model`, which is handed a mesh and a communicator and asks for neither.
"""

from legato.parallel.communicators import ALONE, Communicator, SingleRank
from legato.parallel.distributed import DistributedRank
from legato.parallel.loopback import Exchanges, LoopBack
from legato.parallel.mesh import ONE_RANK, Mesh

__all__ = ["ALONE", "ONE_RANK", "Communicator", "DistributedRank", "Exchanges", "LoopBack", "Mesh", "SingleRank"]
