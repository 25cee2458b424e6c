"""The feed-forward half of a layer: a dense SwiGLU, or routed experts plus a shared one.

Routing is float32 always; the bias chooses, the unbiased sigmoid weighs. Called by `model.layer`.
"""

from __future__ import annotations

from torch import Tensor

from legato.model.spec import ModelSpec
from legato.model.weights import MlpWeights, MoeWeights
from legato.ops import route


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    """down(silu(gate x) * up x) on [T, D] rows."""
    return weights.down.linear(weights.gate_up.linear_swiglu(x))


def moe(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
    """sum_k w_k Expert_k(x) + Shared(x) on [T, D] rows; the shared expert is not scaled, and may be among the routed ones."""
    expert_ids, expert_weights = route(x, weights.router, weights.bias, spec.experts_per_token, spec.routed_scale)
    y = weights.experts.moe(x, expert_ids, expert_weights)
    return y if weights.shared is None else y + mlp(x, weights.shared)
