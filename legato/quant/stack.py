"""Experts that come one after the other, in tensors of all of them.

Owns how gate, up and down rows lie in these. Must not know formats. Called by the format modules' `collect`, for codes and scales
alike.
"""

from __future__ import annotations

import torch


class Stack:
    """w13 [E, 2F, *] (gate rows, then up rows) and w2 [E, D, *]; the first expert decides the shapes and the type."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.w13 = self.w2 = torch.empty(0, device=device)
        self._num_experts = num_experts

    def put(self, expert: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Rows [F, *], [F, *] and [D, *] of an expert; expert 0 first."""
        if expert == 0:
            self.w13 = self._room(2 * gate.shape[0], gate)
            self.w2 = self._room(down.shape[0], down)
        self.w13[expert, : gate.shape[0]], self.w13[expert, gate.shape[0] :] = gate, up
        self.w2[expert] = down

    def _room(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        shape = (self._num_experts, rows, like.shape[1])
        return torch.empty(shape, dtype=like.dtype, device=self.w13.device)
