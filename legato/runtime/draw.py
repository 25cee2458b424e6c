"""How an iteration chooses tokens: from the logits as they are, or with a request's controls and grammar before that.

Owns the variants (greedy, general; plain, controlled) and what a verifying row supposes: row r of a request sees its drafts
0..r-1 as if they had been accepted, which is exact, since what it says is used only if they were. Called by `runtime.speculate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from legato.ops import greedy, sample
from legato.runtime.batch import Samplers
from legato.runtime.controls import ControlTable
from legato.runtime.grammar import Gate, allowed_tokens
from legato.runtime.rows import Rows
from legato.runtime.staging import staged

Positions = Callable[[], Tensor]
"""Absolute positions [T] int64 of the tokens to be chosen, computed where they are asked for: the greedy choice needs none."""
Choose = Callable[[Tensor, Rows, Tensor, Positions], Tensor]
"""One token per row of logits [T, W], for device rows [T]."""


def choose_greedy(logits: Tensor, rows: Rows, device_rows: Tensor, positions: Positions) -> Tensor:
    """The highest logit, ties to the lowest id: the variant for batches in which every request has temperature 0."""
    del rows, device_rows, positions
    return greedy(logits)


def choose_general(logits: Tensor, rows: Rows, device_rows: Tensor, positions: Positions) -> Tensor:
    """Temperature, top_k, top_p and min_p of each row; temperature 0 is greedy here too."""
    return sample(
        logits,
        rows.temperature[device_rows],
        rows.top_k[device_rows],
        rows.top_p[device_rows],
        rows.min_p[device_rows],
        rows.seed[device_rows],
        positions(),
    )


Variant = Literal["greedy", "general"]
CHOICES: Mapping[Variant, Choose] = {"greedy": choose_greedy, "general": choose_general}


class Draw(Protocol):
    """Chooses the tokens of one iteration: first `verify`, then `record`, then `draft` once per draft. Each is given what the
    heads say of rows: logits [T, W], or where `wants_best` only the best token of each row, [T] int64."""

    @property
    def wants_best(self) -> bool: ...

    def verify(self, logits: Tensor, rows: Rows, samplers: Samplers) -> Tensor:
        """The target's own tokens [B, R] from its logits [B * R, W]; row r of a request says what follows position base + r."""
        ...

    def record(self, samplers: Samplers, sampled: Tensor, counts: Tensor) -> None:
        """Takes note of what is emitted: the first `counts` [B] of `sampled` [B, R]."""
        ...

    def draft(
        self, logits: Tensor, rows: Rows, samplers: Samplers, positions: Positions, drafted: Sequence[Tensor]
    ) -> Tensor:
        """One more draft [B] from the draft layer's logits [B, W], behind what is emitted and `drafted` (each [B])."""
        ...


@dataclass(frozen=True, slots=True)
class BestDraw:
    """The best tokens and no logits: for batches in which every request is greedy, and nothing else is wanted of logits."""

    @property
    def wants_best(self) -> bool:
        return True

    def verify(self, logits: Tensor, rows: Rows, samplers: Samplers) -> Tensor:
        del rows
        return logits.view(samplers.row_index.shape)

    def record(self, samplers: Samplers, sampled: Tensor, counts: Tensor) -> None:
        del samplers, sampled, counts

    def draft(
        self, logits: Tensor, rows: Rows, samplers: Samplers, positions: Positions, drafted: Sequence[Tensor]
    ) -> Tensor:
        del rows, samplers, positions, drafted
        return logits


@dataclass(frozen=True, slots=True)
class PlainDraw:
    """Samples logits as they are: for batches in which no request has controls."""

    choose: Choose

    @property
    def wants_best(self) -> bool:
        return False

    def verify(self, logits: Tensor, rows: Rows, samplers: Samplers) -> Tensor:
        shape = samplers.row_index.shape
        device_rows = samplers.rows[:, None].expand(shape).reshape(-1)
        return self.choose(logits, rows, device_rows, lambda: samplers.following().reshape(-1)).view(shape)

    def record(self, samplers: Samplers, sampled: Tensor, counts: Tensor) -> None:
        del samplers, sampled, counts

    def draft(
        self, logits: Tensor, rows: Rows, samplers: Samplers, positions: Positions, drafted: Sequence[Tensor]
    ) -> Tensor:
        del drafted
        return self.choose(logits, rows, samplers.rows, positions)


@dataclass(frozen=True, slots=True)
class ControlledDraw:
    """Penalties, bias, bans and grammars first. `gates`: sampling request (index into B) -> its grammar.

    Drafts pass through the same controls, or good ones would be rejected at every position that the controls change. A grammar
    is followed on the host, so gates wait for the device in every iteration. Where it must not be waited for, there are none, and
    the masks of the verifying rows (index into B * R) have been `foreseen`.
    """

    choose: Choose
    controls: ControlTable
    gates: Mapping[int, Gate]
    foreseen: Mapping[int, bytes] = field(default_factory=lambda: MappingProxyType[int, bytes]({}))

    @property
    def wants_best(self) -> bool:
        return False

    def verify(self, logits: Tensor, rows: Rows, samplers: Samplers) -> Tensor:
        num_requests, width = samplers.row_index.shape
        positions = samplers.following().reshape(-1)
        offsets = torch.arange(width, device=logits.device)
        # [R, R - 1]: row r supposes drafts 0..r-1.
        is_before = offsets[: width - 1] < offsets[:, None]
        supposed = torch.where(is_before, samplers.drafts[:, None, :], -1).view(num_requests * width, width - 1)
        device_rows = samplers.rows[:, None].expand(num_requests, width).reshape(-1)
        masks = dict(self.foreseen)
        for index, gate in self.gates.items():
            drafts = samplers.drafts[index, : int(samplers.num_drafts[index])].tolist()
            masks |= {index * width + offset: mask for offset, mask in enumerate(gate.masks(drafts))}
        changed = self._changed(logits, device_rows, positions, supposed, masks)
        return self.choose(changed, rows, device_rows, lambda: positions).view(num_requests, width)

    def record(self, samplers: Samplers, sampled: Tensor, counts: Tensor) -> None:
        self.controls.record(samplers.rows, sampled, counts)
        for index, gate in self.gates.items():
            gate.accept(sampled[index, : int(counts[index])].tolist())

    def draft(
        self, logits: Tensor, rows: Rows, samplers: Samplers, positions: Positions, drafted: Sequence[Tensor]
    ) -> Tensor:
        supposed = torch.stack(list(drafted), 1) if drafted else samplers.rows.new_empty((len(samplers.rows), 0))
        masks: dict[int, bytes] = {}
        for index, gate in self.gates.items():
            reached = gate.masks(supposed[index].tolist())
            if len(reached) > len(drafted):
                masks[index] = reached[-1]
        changed = self._changed(logits, samplers.rows, positions(), supposed, masks)
        return self.choose(changed, rows, samplers.rows, positions)

    def _changed(
        self, logits: Tensor, device_rows: Tensor, positions: Tensor, supposed: Tensor, masks: Mapping[int, bytes]
    ) -> Tensor:
        """[T, W] logits after controls and grammar masks (by index into T). Where nothing is left, the grammar alone counts."""
        out = self.controls.apply(logits, device_rows, positions, supposed)
        plain = logits.float()
        if masks:
            index = staged(list(masks), torch.int64, logits.device)
            allowed = allowed_tokens(list(masks.values()), logits.shape[1], logits.device)
            out = out.index_copy(0, index, out[index].masked_fill(~allowed, -torch.inf))
            plain = plain.index_copy(0, index, plain[index].masked_fill(~allowed, -torch.inf))
        is_empty = (out == -torch.inf).all(1, keepdim=True)
        return torch.where(is_empty, plain, out)
