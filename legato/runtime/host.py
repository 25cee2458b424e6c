"""Host memory for pages that the prefix cache has evicted: one row of bytes per page, all layers together.

Latents, index keys and those of the draft layer move as one, so a page that comes back is whole. Which page goes where is the
scheduler's business. Called by the runner, before an iteration's first kernel and on its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from legato.model.step import LayerCache
from legato.plan import Move, Offload
from legato.runtime.staging import staged


class HostPages:
    """Slots 1..`num_slots` of host memory for pages of these caches; pinned where the caches are on a GPU.

    Nothing waits for a copy: everything is issued on the stream of the iterations, in order, so a page that comes back is read
    after its copy, and one that goes is written after it. The host itself never reads or writes a slot.
    """

    def __init__(self, caches: Sequence[LayerCache], num_slots: int) -> None:
        self._parts = [
            _bytes_of(tensor) for cache in caches for tensor in (cache.latent, cache.index) if tensor is not None
        ]
        self._widths = [part.shape[1] for part in self._parts]
        self._device = self._parts[0].device
        self.slots = torch.empty(
            (num_slots + 1, sum(self._widths)), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        return self.slots.shape[1]

    def move(self, moves: Sequence[Move]) -> None:
        """Carries out copies as if one after the other."""
        for run in _independent(moves):
            pages = staged([move.page for move in run], torch.int64, self._device)
            if isinstance(run[0], Offload):
                together = torch.cat([part[pages] for part in self._parts], dim=1)
                for place, move in enumerate(run):
                    self.slots[move.slot].copy_(together[place], non_blocking=True)
            else:
                together = torch.empty((len(run), self.page_bytes), dtype=torch.uint8, device=self._device)
                for place, move in enumerate(run):
                    together[place].copy_(self.slots[move.slot], non_blocking=True)
                for part, piece in zip(self._parts, together.split(self._widths, dim=1), strict=True):
                    part[pages] = piece


def _bytes_of(cache: Tensor) -> Tensor:
    """A cache [P, ...] as bytes [P, *], the same memory."""
    return cache.view(cache.shape[0], -1).view(torch.uint8)


MOST_TOGETHER = 16
"""Pages copied together; what they need on the device beside the caches is this many pages."""


def _independent(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Cuts a sequence of copies into runs of one direction that use no slot and no page twice."""
    for _, same in groupby(moves, key=type):
        run: list[Move] = []
        for move in same:
            is_used = any(move.slot == other.slot or move.page == other.page for other in run)
            if is_used or len(run) == MOST_TOGETHER:
                yield run
                run = []
            run.append(move)
        yield run
