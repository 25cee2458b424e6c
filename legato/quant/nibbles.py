"""What weights of four bits share: two columns in a byte, and scales beside them.

Owns the shape that follows from that. Must not know what a nibble means or how a scale applies. Called by `quant.int4` and
`quant.nvfp4`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.quant.weight import PlainProducts


@dataclass(frozen=True)
class NibbleWeight(PlainProducts):
    """packed u8 [N, K/2] and one scale for every so many columns of a row."""

    packed: torch.Tensor
    scale: torch.Tensor

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def in_features(self) -> int:
        return self.packed.shape[1] * 2
