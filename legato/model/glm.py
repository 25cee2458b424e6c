"""The target model: embedding, decoder layers with IndexShare, final norm and head. Reads like the paper.

Computes rows; decides nothing about which rows run. Called by the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from legato.model.layer import decoder_layer
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import GlmWeights
from legato.ops import rms_norm


@dataclass(frozen=True, slots=True)
class Glm:
    """GLM-5.2's layers 0..L-1 over paged caches."""

    spec: ModelSpec
    weights: GlmWeights

    def hidden(self, ids: Tensor, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Runs rows through every layer; their latents and index keys are stored on the way.

        Args:
            ids: [T] int64 token ids.
            step: where the rows stand.
            caches: one per layer.

        Returns:
            [T, D] hidden states *after* `model.norm`: what the head reads, and what the MTP layer is fed.
        """
        x = embedding(ids, self.weights.embed)
        selection: Selection | None = None
        for weights, cache, kind in zip(self.weights.layers, caches, self.spec.indexer_kinds, strict=False):
            x, selection = decoder_layer(x, weights, cache, step, selection if kind == "shared" else None, self.spec)
        return rms_norm(x, self.weights.norm, self.spec.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, W] float32 logits of post-norm hidden states."""
        return self.weights.lm_head.linear(hidden).float()
