"""Optimisers of the training: Muon for the hidden matrices, AdamW for embeddings, head, norms, routers and indexers.

Owns which parameter goes where and the batched Newton-Schulz step. Knows nothing of the schedule; `train.py` sets the
learning rate of every group before each step.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from model import Model
from torch import Tensor, nn


def newton_schulz(g: Tensor, steps: int = 5) -> Tensor:
    """Approximately orthogonalises each matrix of a batch [n, rows, columns] (quintic iteration, in bf16)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum, orthogonalised; updates are scaled to the size of AdamW's (0.2 sqrt(max side)). Matrices of one shape go
    through one batched iteration; a stacked parameter [n, rows, columns] counts as n matrices."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        self.momentum, self.weight_decay, self.lr = momentum, weight_decay, 0.0
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            groups[tuple(p.shape[-2:])].append(p)
        self.groups = list(groups.values())
        self.state = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients at hand; parameters without one are left alone."""
        for group, state in zip(self.groups, self.state, strict=True):
            live = [(p, m) for p, m in zip(group, state, strict=True) if p.grad is not None]
            if not live:
                continue
            params, momenta = [p for p, _ in live], [m for _, m in live]
            grads = [p.grad for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - self.momentum)
            nesterov = torch._foreach_lerp(grads, momenta, self.momentum)
            shape = params[0].shape[-2:]
            stacked = torch.cat([g.reshape(-1, *shape) for g in nesterov])
            update = newton_schulz(stacked) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(params, 1 - self.lr * self.weight_decay)
            pieces = update.split([g.reshape(-1, *shape).shape[0] for g in nesterov])
            torch._foreach_add_(params, [u.view_as(p) for u, p in zip(pieces, params, strict=True)], alpha=-self.lr)


class Optimisers:
    """Muon and AdamW together, with learning rates by role: matrices, embedding, other, indexer."""

    def __init__(self, model: Model) -> None:
        roles: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, p in model.named_parameters():
            if ".indexer." in name:
                roles["indexer"].append(p)
            elif name in ("embed_tokens", "lm_head"):
                roles[name].append(p)
            elif p.ndim >= 2 and "router" not in name:
                roles["matrices"].append(p)
            else:
                roles["other"].append(p)
        self.muon = Muon(roles.pop("matrices"))
        self.roles = list(roles)
        on_gpu = next(model.parameters()).is_cuda
        self.adam = torch.optim.AdamW([{"params": roles[r], "lr": 0.0} for r in self.roles], betas=(0.9, 0.95), eps=1e-10,
                                      weight_decay=0.0, fused=on_gpu)

    def set_rates(self, rates: dict[str, float]) -> None:
        """Sets the learning rate of every role ("matrices" is Muon's)."""
        self.muon.lr = rates["matrices"]
        for role, group in zip(self.roles, self.adam.param_groups, strict=True):
            group["lr"] = rates[role]

    def step(self) -> None:
        """One update of all parameters that have gradients, then clears the gradients."""
        self.muon.step()
        self.adam.step()
        for group in self.muon.groups:
            for p in group:
                p.grad = None
        self.adam.zero_grad(set_to_none=True)
