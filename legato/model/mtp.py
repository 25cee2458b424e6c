"""The multi-token-prediction layer: drafts the tokens that the target verifies.

One complete decoder layer with its own indexer and caches. Row i is fed the token at i + 1 and a post-norm hidden state at
i, and predicts the token at i + 2. Called by the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from legato.model.layer import decoder_layer
from legato.model.lean import DraftHead
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import MtpWeights
from legato.ops import greedy_keys, linear_draft, mtp_inputs, mtp_looked_up, rms_norm
from legato.parallel.communicators import ALONE, Communicator, best_token


@dataclass(frozen=True, slots=True)
class Mtp:
    """The MTP layer of a checkpoint; `embed` [W, D] is the target's, and so is `head` [W, D] as `linear_draft.pack` made it,
    where drafts have none of their own."""

    spec: ModelSpec
    weights: MtpWeights
    embed: Tensor
    head: Tensor | DraftHead
    communicator: Communicator = ALONE

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, W] logits of drafts, for hidden states that `forward` returned and in their dtype."""
        head, width = self.head, self.spec.vocab_size
        shard = linear_draft(hidden, head) if isinstance(head, Tensor) else head.weight.linear(hidden)
        logits = self.communicator.all_gather(shard, -1)
        if isinstance(head, Tensor) or head.ids is None:
            return logits[:, :width]
        return logits.new_full((logits.shape[0], width), -torch.inf).index_copy_(1, head.ids, logits)

    def best(self, hidden: Tensor) -> Tensor:
        """[T] int64 tokens with the highest of these logits, without gathering them."""
        head, communicator, vocab_size = self.head, self.communicator, self.spec.vocab_size
        if isinstance(head, Tensor):
            shard = linear_draft(hidden, head)
            keys = partial(_best_behind, shard)
            return best_token(keys, shard.shape[1], vocab_size, communicator)
        keys, width = partial(head.weight.best_keys, hidden), head.weight.out_features
        if head.ids is None:
            return best_token(keys, width, vocab_size, communicator)
        return head.ids[best_token(keys, width, head.ids.shape[0], communicator)]

    def forward(
        self, next_ids: Tensor, hidden: Tensor, step: Step, cache: LayerCache, selection: Selection | None
    ) -> tuple[Tensor, Selection]:
        """One pass over rows.

        Draft-extend passes `selection=None`: the layer's own indexer chooses per row. The chain of single-row steps passes the
        seed, the selection of the last accepted row, unchanged: drafted positions are never added to it, and nothing that they
        would store is ever read, so such rows have slot -1.

        Args:
            next_ids: [T] int64, the token *after* each row's position.
            hidden: [T, D] post-norm hidden states: the target's (after `model.norm`), or in the chain this layer's own output.
            step: where the rows stand; the position is that of the hidden state.
            cache: of this layer.
            selection: what rows attend to, or `None`.

        Returns:
            [T, D] after `shared_head.norm` (the head reads it, the next chain step is fed it), and the selection used.
        """
        eps, weights = self.spec.rms_eps, self.weights
        projection = weights.eh_proj
        if projection.table is None:
            u = mtp_inputs(next_ids, step.positions, hidden, self.embed, weights.enorm, weights.hnorm, eps)
            h = projection.weight.linear(u)
        else:
            part, u = mtp_looked_up(next_ids, step.positions, hidden, projection.table, weights.hnorm, eps)
            h = projection.weight.linear(u, part)
        if h.shape[1] != hidden.shape[1]:
            h = self.communicator.all_gather(h, -1)
        layer = self.weights.layer if selection is None else self.weights.seeded
        normed = rms_norm(h, layer.input_norm, eps)
        _, normed, selection = decoder_layer(
            h, normed, layer, cache, step, selection, self.weights.norm, self.spec, self.communicator
        )
        return normed, selection


def _best_behind(logits: Tensor, first: int, count: int) -> Tensor:
    return greedy_keys(logits[:, :count], first)
