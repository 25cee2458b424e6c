"""Counter-based random numbers: the same (key, counter) gives the same bits on every device, in any batch and in any
order.

Owns Philox4x32-10 and the mapping from bits to uniforms. Plain functions, not ops. Called by `sample`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox on four counter words under two key words; words are int64 tensors in [0, 2^32), broadcast
    together.

    A product of two words wraps in int64, and its two halves are still right: the wrap is modulo 2^64.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; tested against the Random123 known
    answers.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _MASK) ^ c1 ^ k0,
            second & _MASK,
            ((first >> 32) & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """`count` float32 uniforms in (0, 1) for each (seed, position): number i is word i % 4 of the counter (i // 4, 0,
    position).

    seed [B] and position [B] int64 -> [B, count]. A word w gives ((w >> 9) + 0.5) / 2^23, which float32 holds exactly:
    never 0, never 1.
    """
    blocks = torch.arange(-(-count // 4), dtype=torch.int64, device=seed.device).unsqueeze(0)
    seed, position = seed.to(torch.int64).unsqueeze(1), position.to(torch.int64).unsqueeze(1)
    counter = (blocks, torch.zeros_like(blocks), position & _MASK, (position >> 32) & _MASK)
    words = philox_4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :count]
    return ((bits >> 9).to(torch.float32) + 0.5) * 2.0**-23
