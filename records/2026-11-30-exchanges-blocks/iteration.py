"""The whole iteration of a rank of eight, alone and with exchanges: `iteration.py FILE [RANK PORT]`.

Without RANK: the rank's words go to as many places of its own inbox as it has peers, and it polls them. With it, twice at once,
on two GPUs: each plays all peers of the other, so that all their words cross the link. Both give the sum of the own part so many
times, since both GPUs hold the same share. Each way's median, in microseconds, is a line of FILE; `same` says whether its tokens
are those of the first way of so many parts.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from cuda.bindings import runtime
from torch import Tensor

from legato.bench.share import routed
from legato.bench.steady import Work, loop, pack, steady
from legato.cli.slice import Asked, as_an_engine, bind_ops, share_of
from legato.config import RankAddress
from legato.ops import add_rms_norm, all_gather, all_reduce_add_norm
from legato.ops.reduce.inbox import ALARM_WORDS, EMPTY_BYTE, MOST_WORDS, Inbox, InboxShape
from legato.parallel import Mesh
from legato.parallel.communicators import side_by_side
from legato.parallel.ipc import _call, _map, write
from legato.parallel.meeting import StoreMeeting

WIDTH, TURNS = 6144, 3
Meet = Callable[[bytes], Sequence[bytes]]


@dataclass(frozen=True)
class Repeated:
    """An exchange whose ranks all send what this one does."""

    num_ranks: int

    def gather(self, shard: Tensor) -> Sequence[Tensor]:
        return [shard] * self.num_ranks


@dataclass(frozen=True)
class Alone:
    """The own part so many times, in one launch; gathers as `legato.parallel.loopback` has them."""

    num_parts: int
    mesh: Mesh

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self.num_parts == 1:
            return add_rms_norm(residual, partial, weight, eps)
        return all_reduce_add_norm(partial, residual, weight, eps, Repeated(self.num_parts))

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        if shard.shape[dim] == 1:
            return shard.expand([self.mesh.size if at == dim % shard.dim() else -1 for at in range(shard.dim())])
        return side_by_side(all_gather(shard, Repeated(self.mesh.size)), dim)


@dataclass(frozen=True)
class Through(Alone):
    """Sums through an inbox; gathers too, where the ranks are as many as the share's. A sum's places lie apart otherwise than a
    gather's, so each has an inbox."""

    sums: Inbox
    gathers: Inbox

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return all_reduce_add_norm(partial, residual, weight, eps, self.sums)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        if self.num_parts != self.mesh.size:
            return super().all_gather(shard, dim)
        return side_by_side(all_gather(shard, self.gathers), dim)


def inbox(num_ranks: int, pitch: int, meet: Meet | None, rank: int) -> Inbox:
    """Of a rank 0, whose peers' places, `pitch` bytes apart, are those of its own inbox or of the other GPU's."""
    shape = InboxShape(num_ranks, WIDTH)
    own = int(_call(runtime.cudaMalloc, shape.num_bytes))
    _call(runtime.cudaMemset, own, EMPTY_BYTE, shape.num_bytes)
    peer = own if meet is None else _map(meet(bytes(_call(runtime.cudaIpcGetMemHandle, own).reserved))[1 - rank])
    alarm = torch.zeros(ALARM_WORDS, dtype=torch.int32, pin_memory=True)
    addresses = [own, *(peer + place * pitch for place in range(1, num_ranks))]
    write(own, shape.header(addresses, alarm.data_ptr(), 20 * 10**9))
    if meet is not None:
        meet(b"")  # nobody sends before both are empty
    return Inbox(0, shape, own, alarm, Repeated(num_ranks))


def main(path: str, rank: int = 0, port: int = 0) -> None:
    """Measures each way in turn."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    address = RankAddress(rank, 2, "127.0.0.1", port, serves_store=rank == 0)
    meet = StoreMeeting.at(address, 200) if port else None
    asked = Asked(None, "glm-5.2", 8, 0, None, True, "nvfp4", "auto", "stored", str(device), None)
    work = Work(1, 8192, 5, 40, 44.0, "auto", {})
    bind_ops(work, device)
    torch.cuda.init()
    boxes = {n: [inbox(n, pitch, meet, rank) for pitch in (128 * WIDTH * 2, MOST_WORDS * 8)] for n in (8, 4, 2)}
    share = routed(share_of(as_an_engine(asked, device), [work], device), work.distinct_experts, work.num_drafts + 1)
    pack(share, work, device)
    mesh = share.communicator.mesh
    ways = [Alone(1, mesh)]
    for num_ranks, made in boxes.items():
        ways += [Alone(num_ranks, mesh), Through(num_ranks, mesh, *made)]
    tokens: dict[int, list[int]] = {}
    for turn in range(TURNS):
        for way in ways:
            standing = steady(replace(share, communicator=way), work, device)  # pyright: ignore[reportArgumentType]
            if meet is not None:
                meet(b"")
            us = sorted(loop(standing, work.iterations).ends)
            torch.cuda.synchronize()
            for made in boxes.values():
                for box in made:
                    box.check()
            came = standing.runner.rows.tokens.flatten().tolist()
            line = {
                "way": type(way).__name__.lower(),
                "parts": way.num_parts,
                "turn": turn,
                "median_us": us[len(us) // 2],
            }
            line |= {"same": came == tokens.setdefault(way.num_parts, came), "gpu_number": rank}
            with open(path, "a") as file:
                print(json.dumps(line), file=file)
            del standing
            gc.collect()
            torch.cuda.empty_cache()
    if meet is not None:
        meet(b"")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
