"""One decoder layer: attention and feed-forward, each on normed input with its residual.

The same function serves the target's layers and the MTP layer. Called by `model.glm` and `model.mtp`.
"""

from __future__ import annotations

from torch import Tensor

from legato.model.attention import attention
from legato.model.moe import mlp, moe
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache, Selection, Step
from legato.model.weights import LayerWeights, MoeWeights
from legato.ops import rms_norm


def decoder_layer(
    x: Tensor, weights: LayerWeights, cache: LayerCache, step: Step, selection: Selection | None, spec: ModelSpec
) -> tuple[Tensor, Selection]:
    """h = x + Attn(norm(x)); out = h + MLP(norm(h)), on [T, D] rows. Returns the selection for the shared layers that follow."""
    attended, selection = attention(
        rms_norm(x, weights.input_norm, spec.rms_eps), weights.attention, cache, step, selection, spec
    )
    h = x + attended
    normed = rms_norm(h, weights.post_norm, spec.rms_eps)
    fed = moe(normed, weights.mlp, spec) if isinstance(weights.mlp, MoeWeights) else mlp(normed, weights.mlp)
    return h + fed, selection
