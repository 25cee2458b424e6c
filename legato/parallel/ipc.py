# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUnknownParameterType=false
"""Ranks on the GPUs of one host, each a process, that write into each other's memory.

Owns the mapping of inboxes over CUDA IPC, and the communicator over them. Must not know the layout beyond its size, nor how
processes were started: they meet through a function that gathers bytes. Called by whoever starts ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from legato.ops.reduce import all_gather, all_reduce_add_norm
from legato.ops.reduce.inbox import ALARM_WORDS, EMPTY_BYTE, MOST_CALLS, MOST_WORDS, PATIENCE_AT, Inbox, InboxShape
from legato.parallel.communicators import Communicator, side_by_side
from legato.parallel.mesh import Mesh

try:
    from cuda.bindings import runtime
except ImportError as error:
    raise ImportError("ranks that share memory need the cuda extra: pip install 'legato[cuda]'") from error

Meet = Callable[[bytes], Sequence[bytes]]
"""Gives every rank's bytes, in the order of ranks; returns when all ranks have called it."""


class IpcError(RuntimeError):
    """The GPUs of the ranks cannot map each other's memory."""


class Library(Communicator, Protocol):
    """The communicator for what inboxes do not take; it is an `Exchange` too."""

    def gather(self, shard: Tensor, /) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Mapped:
    """Device addresses of all ranks' inboxes in this process, in the order of ranks; one of them is this rank's own."""

    mesh: Mesh
    addresses: tuple[int, ...]

    def close(self) -> None:
        """Unmaps the peers' inboxes and frees the own one. No rank may be in a collective any more."""
        for rank, address in enumerate(self.addresses):
            if rank != self.mesh.rank:
                _call(runtime.cudaIpcCloseMemHandle, address)
        _call(runtime.cudaFree, self.addresses[self.mesh.rank])


@dataclass(frozen=True, slots=True)
class IpcRank:
    """One rank of a group whose sums and gathers go through inboxes, those that these do not take through `library`.

    `check` raises RankLostError once a rank has not come in time; until then results are right, from then on NaN.
    """

    mesh: Mesh
    inbox: Inbox
    library: Library
    mapped: Mapped

    def add_norm(self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return all_reduce_add_norm(partial, residual, weight, eps, self.inbox)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self.library.all_reduce(partial)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        if shard.nbytes > 4 * MOST_CALLS * MOST_WORDS:
            return self.library.all_gather(shard, dim)
        return side_by_side(all_gather(shard, self.inbox), dim)

    def check(self) -> None:
        """Raises RankLostError where a wait was given up; reads host memory only."""
        self.inbox.check()

    def wait_at_most(self, seconds: float) -> None:
        """How long later collectives wait for a rank. Waits for the device."""
        write(self.inbox.address + PATIENCE_AT, round(seconds * 1e9).to_bytes(8, "little"))

    def close(self) -> None:
        """Gives the memory back, once all ranks are done with it."""
        self.mapped.close()


def connect(mesh: Mesh, meet: Meet, shape: InboxShape, patience_seconds: float, library: Library) -> IpcRank:
    """This rank's communicator on its current device: allocates an inbox, maps those of the peers, and meets twice.

    `patience_seconds`: how long a collective waits for a rank at most. Raises IpcError where memory cannot be mapped, and
    ValueError where the group's size is not the inboxes'.
    """
    if mesh.size != shape.num_ranks:
        raise ValueError(f"the group has {mesh.size} ranks, the inboxes are made for {shape.num_ranks}")
    torch.cuda.init()
    own = int(_call(runtime.cudaMalloc, shape.num_bytes))
    _call(runtime.cudaMemset, own, EMPTY_BYTE, shape.num_bytes)
    handle = _call(runtime.cudaIpcGetMemHandle, own)
    handles = meet(bytes(handle.reserved))
    mapped = Mapped(mesh, tuple(own if rank == mesh.rank else _map(data) for rank, data in enumerate(handles)))
    alarm = torch.zeros(ALARM_WORDS, dtype=torch.int32, pin_memory=True)
    write(own, shape.header(mapped.addresses, alarm.data_ptr(), round(patience_seconds * 1e9)))
    meet(b"")  # nobody sends before every inbox is empty
    return IpcRank(mesh, Inbox(mesh.rank, shape, own, alarm, library), library, mapped)


def write(address: int, data: bytes) -> None:
    """Copies bytes to device memory and waits until they are there."""
    source = ctypes.create_string_buffer(data, len(data))
    _call(
        runtime.cudaMemcpy,
        address,
        ctypes.addressof(source),
        len(data),
        runtime.cudaMemcpyKind.cudaMemcpyHostToDevice,
    )
    _call(runtime.cudaDeviceSynchronize)


def _map(handle: bytes) -> int:
    opened = runtime.cudaIpcMemHandle_t()
    opened.reserved = handle
    return int(_call(runtime.cudaIpcOpenMemHandle, opened, runtime.cudaIpcMemLazyEnablePeerAccess))


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """What a function of the CUDA runtime returns beside its status. Raises IpcError with the runtime's words."""
    status, *made = function(*arguments)
    if int(status):
        _, text = runtime.cudaGetErrorString(status)
        raise IpcError(f"{function.__name__}: {text.decode()}")
    return made[0] if made else None
