"""One decoder layer: attention and feed-forward, each followed by its residual and the norm that the next block reads.

The same function serves the target's layers and the MTP layer. Called by `model.glm` and `model.mtp`.
"""

from __future__ import annotations

from torch import Tensor

from legato.model.attention import attention
from legato.model.moe import mlp, moe
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import LayerWeights, MoeWeights
from legato.parallel.communicators import Communicator


def decoder_layer(
    h: Tensor,
    normed: Tensor,
    weights: LayerWeights,
    cache: LayerCache,
    step: Step,
    selection: Selection | None,
    next_norm: Tensor,
    spec: ModelSpec,
    communicator: Communicator,
) -> tuple[Tensor, Tensor, Selection]:
    """a = h + Attn(normed); out = a + MLP(norm(a)), on [T, D] rows.

    Where the model is sharded, both blocks give a rank's partial sum; adding them to the residual is where ranks meet.

    Args:
        h: [T, D] the residual stream.
        normed: [T, D] its norm under this layer's `input_norm`; whoever made `h` made it too.
        weights: of this layer.
        cache: of this layer.
        step: where the rows stand.
        selection: what the rows attend to; `None` lets this layer's indexer choose.
        next_norm: [D] the norm that whatever comes after this layer reads: the next layer's `input_norm`, or the final one.
        spec: the model's shapes.
        communicator: the ranks of the model.

    Returns:
        [T, D] the stream after this layer, [T, D] its norm under `next_norm`, and the selection for shared layers that follow.
    """
    attended, selection = attention(normed, weights.attention, cache, step, selection, spec)
    h, normed = communicator.add_norm(attended, h, weights.post_norm, spec.rms_eps)
    fed = moe(normed, weights.mlp, spec) if isinstance(weights.mlp, MoeWeights) else mlp(normed, weights.mlp)
    h, normed = communicator.add_norm(fed, h, next_norm, spec.rms_eps)
    return h, normed, selection
