"""The target model: embedding, decoder layers with IndexShare, final norm and head. Reads like the paper.

Computes rows; decides nothing about which rows run. Called by the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from legato.model.attention import planned
from legato.model.layer import decoder_layer
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import GlmWeights
from legato.ops import rms_norm
from legato.parallel.communicators import ALONE, Communicator


@dataclass(frozen=True, slots=True)
class Glm:
    """GLM-5.2's layers 0..L-1 over paged caches."""

    spec: ModelSpec
    weights: GlmWeights
    communicator: Communicator = ALONE

    def hidden(self, ids: Tensor, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Runs rows through every layer; their latents and index keys are stored on the way.

        Args:
            ids: [T] int64 token ids.
            step: where the rows stand.
            caches: one per layer.

        Returns:
            [T, D] hidden states *after* `model.norm`: what the head reads, and what the MTP layer is fed.
        """
        layers, spec = self.weights.layers, self.spec
        step = planned(step)
        h = embedding(ids, self.weights.embed)
        next_norms = [*(layer.input_norm for layer in layers), self.weights.norm]
        normed = rms_norm(h, next_norms[0], spec.rms_eps)
        selection: Selection | None = None
        for layer, cache, kind, next_norm in zip(layers, caches, spec.indexer_kinds, next_norms[1:], strict=False):
            reused = selection if kind == "shared" else None
            h, normed, selection = decoder_layer(
                h, normed, layer, cache, step, reused, next_norm, spec, self.communicator
            )
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, W] logits of post-norm hidden states, in their dtype, of the whole vocabulary on every rank."""
        shard = self.weights.lm_head.linear(hidden)
        return self.communicator.all_gather(shard, -1)[:, : self.spec.vocab_size]
