"""Batched decoding of the training model with full caches and sparse selection.

Owns the caches and the choice of the next token. The caller turns compilation off around it. `evaluate.py` continues the
held-out prompts with it, `train.py` makes the model's own text with it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from attend import attend_dense, fake_quantise_e4m3
from model import (
    Layer,
    Model,
    dense_mlp,
    final_norm,
    index_keys,
    index_queries,
    keys_values,
    linear,
    moe,
    queries,
    rope_table,
)
from torch import Tensor


class Decoder:
    """Token-by-token decoding of many rows at the same position, with full caches and sparse selection."""

    def __init__(self, model: Model, batch: int, length: int, dtype: torch.dtype) -> None:
        c, device = model.config, model.norm.device
        self.model, self.c, self.dtype = model, c, dtype
        count, heads = len(model.layers), c.num_attention_heads
        self.k = torch.zeros(count, batch, heads, length, c.qk_head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(count, batch, heads, length, c.v_head_dim, dtype=dtype, device=device)
        self.index_k = torch.zeros(count, batch, length, c.index_head_dim, dtype=dtype, device=device)
        self.cos, self.sin = rope_table(c, length, device)

    def select(self, layer: Layer, at: int, i: int, normed: Tensor, q_lora: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Writes the index key of this position; the selected positions [B, top-k], or None when all are."""
        self.index_k[i, :, at] = fake_quantise_e4m3(index_keys(normed, layer.indexer, self.c, cos, sin))
        if at < self.c.index_topk:
            return None
        q, w = index_queries(normed, q_lora, layer.indexer, self.c, cos, sin)
        dots = F.relu(torch.matmul(fake_quantise_e4m3(q), self.index_k[i, :, : at + 1].transpose(1, 2)).float())
        return torch.einsum("bhk,bh->bk", dots, w).topk(self.c.index_topk, -1).indices

    def prefill(self, tokens: Tensor) -> None:
        """Reads tokens [B, P], P at most index_topk, so that step() can go on at position P."""
        model, c, (batch, length) = self.model, self.c, tokens.shape
        cos, sin = (t[:length].repeat(batch, 1) for t in (self.cos, self.sin))
        x = F.embedding(tokens.flatten(), model.embed_tokens).to(self.dtype)
        for i, layer in enumerate(model.layers):
            normed, _, q = queries(x, layer, c, cos, sin)
            k, v = keys_values(normed, layer, c, cos, sin)
            q, k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in (q, k, v))
            self.k[i, :, :, :length], self.v[i, :, :, :length] = k, v
            if layer.indexer is not None:
                index_k = fake_quantise_e4m3(index_keys(normed, layer.indexer, c, cos, sin))
                self.index_k[i, :, :length] = index_k.unflatten(0, (batch, length))
            o = attend_dense(q, k, v, c.qk_head_dim**-0.5).transpose(1, 2).reshape(batch * length, -1)
            x = moe(x, o, layer, c)[0] if hasattr(layer, "router") else dense_mlp(x, o, layer, c)

    def step(self, tokens: Tensor, at: int) -> Tensor:
        """Logits [B, vocabulary] after reading tokens [B] at position `at`."""
        model, c, batch = self.model, self.c, tokens.shape[0]
        cos, sin = (t[at].expand(batch, -1) for t in (self.cos, self.sin))
        x, chosen = F.embedding(tokens, model.embed_tokens).to(self.dtype), None
        for i, layer in enumerate(model.layers):
            normed, q_lora, q = queries(x, layer, c, cos, sin)
            self.k[i, :, :, at], self.v[i, :, :, at] = keys_values(normed, layer, c, cos, sin)
            if layer.indexer is not None:
                chosen = self.select(layer, at, i, normed, q_lora, cos, sin)
            k, v = self.k[i, :, :, : at + 1], self.v[i, :, :, : at + 1]
            scores = torch.matmul(k, q[..., None])[..., 0].float() * c.qk_head_dim**-0.5
            if chosen is not None:
                keep = torch.zeros(batch, at + 1, dtype=torch.bool, device=x.device).scatter_(1, chosen, True)
                scores = scores.masked_fill(~keep[:, None], -math.inf)
            o = torch.matmul(torch.softmax(scores, -1).to(self.dtype)[..., None, :], v).flatten(1)
            x = moe(x, o, layer, c)[0] if hasattr(layer, "router") else dense_mlp(x, o, layer, c)
        return linear(final_norm(x, model.norm, c), model.lm_head).float()


@torch.no_grad()
def generate(model: Model, prompts: list[list[int]], new_tokens: int, sampled: Tensor, dtype: torch.dtype,
             seed: int = 7) -> Tensor:
    """Rows [B, longest prompt + new_tokens]: each prompt continued greedily, or at temperature 1 where `sampled`."""
    device, longest = model.norm.device, max(map(len, prompts))
    total = longest + new_tokens
    rows = torch.zeros(len(prompts), total, dtype=torch.long, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    for i, p in enumerate(prompts):
        rows[i, : len(p)] = torch.tensor(p, device=device)
    decoder = Decoder(model, len(prompts), total, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    for at in range(total - 1):
        following = choose(decoder.step(rows[:, at], at), sampled, generator)
        rows[:, at + 1] = torch.where(at + 1 < lengths, rows[:, at + 1], following)
    return rows


def choose(logits: Tensor, sampled: Tensor, generator: torch.Generator) -> Tensor:
    """argmax of each row, or a draw at temperature 1 where `sampled` is 1 (Gumbel noise)."""
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(1e-20, 1 - 1e-7)
    return (logits - torch.log(-torch.log(uniform)) * sampled[:, None]).argmax(-1)


@torch.no_grad()
def extend(model: Model, prompts: Tensor, new_tokens: int, sampled: Tensor, generator: torch.Generator) -> Tensor:
    """Prompts [B, P] of one length (at most index_topk) continued by new_tokens, in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if prompts.is_cuda else torch.float32
    batch, length = prompts.shape
    decoder = Decoder(model, batch, length + new_tokens, dtype)
    decoder.prefill(prompts[:, : length - 1])
    rows = F.pad(prompts, (0, new_tokens))
    for at in range(length - 1, length + new_tokens - 1):
        rows[:, at + 1] = choose(decoder.step(rows[:, at], at), sampled, generator)
    return rows
