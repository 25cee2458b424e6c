"""The target model: embedding, decoder layers with IndexShare, final norm and head. Reads like the paper.

Computes rows; decides nothing about which rows run. Called by the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from legato.model.layer import decoder_layer
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import GlmWeights
from legato.ops import embed_norm
from legato.parallel.communicators import ALONE, Communicator, best_token


@dataclass(frozen=True, slots=True)
class Midway:
    """T rows on their way through the layers: the residual stream `h` [T, D], its norm [T, D] under what comes next (in the end
    `model.norm`: what the head reads, and what the MTP layer is fed), what the last full layer selected, and how many layers
    they have been through."""

    h: Tensor
    normed: Tensor
    selection: Selection | None
    depth: int


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
        return self.through(self.enter(ids), step, caches, self.spec.num_layers).normed

    def enter(self, ids: Tensor) -> Midway:
        """Rows before the first layer; `ids` [T] int64."""
        return Midway(*embed_norm(ids, self.weights.embed, self._norms[0], self.spec.rms_eps), None, 0)

    def through(self, rows: Midway, step: Step, caches: Sequence[LayerCache], stop: int) -> Midway:
        """The same rows after the layers up to `stop`, which store on the way; the rest may follow later."""
        spec, norms = self.spec, self._norms
        h, normed, selection = rows.h, rows.normed, rows.selection
        for index in range(rows.depth, stop):
            reused = selection if spec.indexer_kinds[index] == "shared" else None
            layer, cache, next_norm = self.weights.layers[index], caches[index], norms[index + 1]
            h, normed, selection = decoder_layer(
                h, normed, layer, cache, step, reused, next_norm, spec, self.communicator
            )
        return Midway(h, normed, selection, stop)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, W] logits of post-norm hidden states, in their dtype, of the whole vocabulary on every rank."""
        shard = self.weights.lm_head.linear(hidden)
        return self.communicator.all_gather(shard, -1)[:, : self.spec.vocab_size]

    def best(self, hidden: Tensor) -> Tensor:
        """[T] int64 tokens with the highest of these logits, without gathering them."""
        head = self.weights.lm_head
        keys = partial(head.best_keys, hidden)
        return best_token(keys, head.out_features, self.spec.vocab_size, self.communicator)

    @property
    def _norms(self) -> list[Tensor]:
        """What norms the rows before each layer, and behind the last."""
        return [*(layer.input_norm for layer in self.weights.layers), self.weights.norm]
