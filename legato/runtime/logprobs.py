"""Log-probabilities of the model's own distribution: of sampled tokens, and of prompts chunk by chunk.

Owns the tensors until the host asks for them, and the tiling that keeps [T, W] small. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.ops import logprobs
from legato.plan import Extend, PromptLogprobs
from legato.runtime.staging import staged
from legato.types import TokenLogprob

TILE = 128
"""Rows of a prompt whose logits exist at one time."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of tokens and their rivals: chosen [*]; top ids and values [*, n]."""

    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor

    def shaped(self, *shape: int) -> Logprobs:
        """The same with other leading dimensions."""
        return Logprobs(self.chosen.view(shape), self.top_ids.view(*shape, -1), self.top_values.view(*shape, -1))

    def rows(self, index: int) -> Logprobs:
        """Entry `index` of the first dimension."""
        return Logprobs(self.chosen[index], self.top_ids[index], self.top_values[index])

    def entries(self, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        """On the host: one entry for each of the first tokens, with `top` rivals."""
        chosen: list[float] = self.chosen.tolist()
        ids: list[list[int]] = self.top_ids[:, :top].tolist()
        values: list[list[float]] = self.top_values[:, :top].tolist()
        return tuple(
            TokenLogprob(token, chosen[at], tuple(zip(ids[at], values[at], strict=True)))
            for at, token in enumerate(tokens)
        )


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Of tokens [T] under logits [T, W]."""
    return Logprobs(*logprobs(logits, tokens, top))


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Log-probabilities of the prompt tokens that follow the rows of one chunk, the first token of the next one included."""

    row: int
    start: int
    tokens: tuple[int, ...]
    top: int
    tiles: tuple[Logprobs, ...]

    def values(self) -> PromptLogprobs:
        """On the host."""
        entries: list[TokenLogprob] = []
        for number, tile in enumerate(self.tiles):
            entries += tile.entries(self.tokens[number * TILE : (number + 1) * TILE], self.top)
        return PromptLogprobs(self.row, self.start, tuple(entries))


def chunk_logprobs(extend: Extend, hidden: Tensor, top: int, head: Callable[[Tensor], Tensor]) -> PromptChunk:
    """The chunk's rows [T, D] of hidden states say how likely the *following* tokens are; the last row of a prompt's last chunk
    samples instead and says nothing here."""
    last = () if extend.next_token is None else (extend.next_token,)
    tokens = extend.tokens[1:] + last
    following = staged(tokens, torch.int64, hidden.device)
    tiles = tuple(
        token_logprobs(head(hidden[at : at + TILE][: len(tokens) - at]), following[at : at + TILE], top)
        for at in range(0, len(tokens), TILE)
    )
    return PromptChunk(extend.row, extend.start + 1, tokens, top, tiles)
