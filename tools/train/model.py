"""The GLM-5.2 architecture laid out for training: batched, flattened to rows, experts computed densely.

Owns the parameters, the forward of the target layers and of the MTP chain, and the probes from which the indexers learn.
Knows nothing of data, optimisers or clocks. `train.py` and `evaluate.py` call it; `export.py` renames its parameters.
Everything is a function of rows [T, hidden]; attention alone sees [batch, length]. The formulas are docs/model.md's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from attend import attend_dense, attend_selected, fake_quantise_e4m3, select_mask
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants; the names are those of config.json."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    intermediate_size: int = 1024
    first_k_dense_replace: int = 1
    moe_intermediate_size: int = 256
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100_000.0
    index_topk: int = 256
    index_n_heads: int = 32
    index_head_dim: int = 128
    indexer_types: tuple[str, ...] = ("full", "shared", "shared", "full", "shared", "shared")
    max_position_embeddings: int = 8192

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass
class Probe:
    """What one indexer learns from on sampled query rows: its own inputs, and (query, key) of the layers it serves."""

    index_q: Tensor  # [B, R, index heads, index dim]
    index_w: Tensor  # [B, R, index heads]
    index_k: Tensor  # [B, S, index dim]
    served: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # q [B, heads, R, D], k [B, heads, S, D]


@dataclass
class Trunk:
    """Result of the target layers: post-norm rows [T, hidden], expert loads per MoE layer, one probe per full layer."""

    hidden: Tensor
    loads: list[Tensor]
    probes: list[Probe]


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}
compile_enabled = False


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `function` through torch.compile once `model.compile_enabled` is set, else as it is."""

    def call(*args: Any) -> Any:
        if not compile_enabled:
            return function(*args)
        if function not in _COMPILED:
            _COMPILED[function] = torch.compile(function, dynamic=False)
        return _COMPILED[function](*args)

    return call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) in fp32, cast back, times weight."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in x's dtype (weights are fp32 masters)."""
    return F.linear(x, weight.to(x.dtype))


def rope_table(config: ModelConfig, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rope dim / 2] in fp32."""
    half = config.qk_rope_head_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs (x[2i], x[2i+1]) of the last axis; cos and sin broadcast to [..., width / 2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


class Indexer(nn.Module):
    """Parameters of one lightning indexer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.wq_b = nn.Parameter(torch.randn(c.index_n_heads * c.index_head_dim, c.q_lora_rank) * c.q_lora_rank**-0.5)
        self.wk = nn.Parameter(torch.randn(c.index_head_dim, c.hidden_size) * c.hidden_size**-0.5)
        self.k_norm_weight = nn.Parameter(torch.ones(c.index_head_dim))
        self.k_norm_bias = nn.Parameter(torch.zeros(c.index_head_dim))
        self.weights_proj = nn.Parameter(torch.randn(c.index_n_heads, c.hidden_size) * c.hidden_size**-0.5)


def matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    """A matrix [rows, columns] whose entries have standard deviation gain / sqrt(columns)."""
    return nn.Parameter(torch.randn(rows, columns) * gain * columns**-0.5)


class Layer(nn.Module):
    """Parameters of one decoder layer; `dense` picks the MLP, `full` gives it an indexer."""

    def __init__(self, c: ModelConfig, dense: bool, full: bool) -> None:
        super().__init__()
        h, heads, i = c.hidden_size, c.num_attention_heads, c.moe_intermediate_size
        out_gain = (2 * c.num_hidden_layers) ** -0.5
        self.input_layernorm = nn.Parameter(torch.ones(h))
        self.post_attention_layernorm = nn.Parameter(torch.ones(h))
        self.q_a_proj = matrix(c.q_lora_rank, h)
        self.q_a_layernorm = nn.Parameter(torch.ones(c.q_lora_rank))
        self.q_b_proj = matrix(heads * c.qk_head_dim, c.q_lora_rank)
        self.kv_a_proj_with_mqa = matrix(c.kv_lora_rank + c.qk_rope_head_dim, h)
        self.kv_a_layernorm = nn.Parameter(torch.ones(c.kv_lora_rank))
        self.kv_b_proj = matrix(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o_proj = matrix(h, heads * c.v_head_dim, out_gain)
        self.indexer = Indexer(c) if full else None
        if dense:
            self.gate_proj = matrix(c.intermediate_size, h)
            self.up_proj = matrix(c.intermediate_size, h)
            self.down_proj = matrix(h, c.intermediate_size, out_gain)
        else:
            e = c.n_routed_experts
            self.router = nn.Parameter(torch.randn(e, h) * 0.5 * h**-0.5)
            self.register_buffer("router_bias", torch.zeros(e))
            self.experts_gate = nn.Parameter(torch.randn(e, i, h) * h**-0.5)
            self.experts_up = nn.Parameter(torch.randn(e, i, h) * h**-0.5)
            self.experts_down = nn.Parameter(torch.randn(e, h, i) * i**-0.5 * out_gain)
            self.shared_gate = matrix(i, h)
            self.shared_up = matrix(i, h)
            self.shared_down = matrix(h, i, out_gain)


class Model(nn.Module):
    """The target model and its MTP layer (`mtp`, index num_hidden_layers in the checkpoint)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size))
        self.lm_head = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size) * 0.3 * c.hidden_size**-0.5)
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.layers = nn.ModuleList(
            Layer(c, dense=i < c.first_k_dense_replace, full=kind == "full") for i, kind in enumerate(c.indexer_types)
        )
        self.mtp = Layer(c, dense=False, full=True)
        self.enorm = nn.Parameter(torch.ones(c.hidden_size))
        self.hnorm = nn.Parameter(torch.ones(c.hidden_size))
        self.eh_proj = matrix(c.hidden_size, 2 * c.hidden_size)
        self.shared_head_norm = nn.Parameter(torch.ones(c.hidden_size))

    def moe_layers(self) -> list[Layer]:
        """Layers with routed experts, the MTP layer last."""
        return [layer for layer in [*self.layers, self.mtp] if hasattr(layer, "router")]


@compiled
def queries(x: Tensor, layer: Layer, c: ModelConfig, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(normed input, normalised q latent, queries [T, heads, D]) of rows x; cos and sin are per row."""
    normed = rms_norm(x, layer.input_layernorm, c.rms_norm_eps)
    q_lora = rms_norm(linear(normed, layer.q_a_proj), layer.q_a_layernorm, c.rms_norm_eps)
    q = linear(q_lora, layer.q_b_proj).unflatten(-1, (c.num_attention_heads, c.qk_head_dim))
    nope, rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
    return normed, q_lora, torch.cat((nope, rotate(rope, cos[:, None], sin[:, None])), -1)


@compiled
def keys_values(normed: Tensor, layer: Layer, c: ModelConfig, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [T, heads, D] and values [T, heads, v] in the non-absorbed form."""
    latent, rope = linear(normed, layer.kv_a_proj_with_mqa).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
    latent = rms_norm(latent, layer.kv_a_layernorm, c.rms_norm_eps)
    both = linear(latent, layer.kv_b_proj).unflatten(-1, (c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim))
    nope, v = both.split((c.qk_nope_head_dim, c.v_head_dim), -1)
    rope = rotate(rope, cos, sin)[:, None].expand(-1, c.num_attention_heads, -1)
    return torch.cat((nope, rope), -1), v


@compiled
def index_queries(normed: Tensor, q_lora: Tensor, indexer: Indexer, c: ModelConfig, cos: Tensor,
                  sin: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries [T, heads, D] (rope on the first dims) and gates [T, heads] in fp32, scale included."""
    q = linear(q_lora, indexer.wq_b).unflatten(-1, (c.index_n_heads, c.index_head_dim))
    rope, rest = q.split((c.qk_rope_head_dim, c.index_head_dim - c.qk_rope_head_dim), -1)
    q = torch.cat((rotate(rope, cos[:, None], sin[:, None]), rest), -1)
    w = linear(normed, indexer.weights_proj).float() * (c.index_n_heads * c.index_head_dim) ** -0.5
    return q, w


@compiled
def index_keys(normed: Tensor, indexer: Indexer, c: ModelConfig, cos: Tensor, sin: Tensor) -> Tensor:
    """Index keys [T, D]: LayerNorm, then rope on the first dims."""
    k = F.layer_norm(linear(normed, indexer.wk).float(), (c.index_head_dim,), indexer.k_norm_weight,
                     indexer.k_norm_bias, 1e-6).to(normed.dtype)
    rope, rest = k.split((c.qk_rope_head_dim, c.index_head_dim - c.qk_rope_head_dim), -1)
    return torch.cat((rotate(rope, cos, sin), rest), -1)


@compiled
def quantised(x: Tensor) -> Tensor:
    """Index queries or keys as the FP8 index cache would give them back."""
    return fake_quantise_e4m3(x)


@compiled
def dense_mlp(x: Tensor, o: Tensor, layer: Layer, c: ModelConfig) -> Tensor:
    """Adds the attention output and the dense SwiGLU to the rows."""
    x = x + linear(o, layer.o_proj)
    normed = rms_norm(x, layer.post_attention_layernorm, c.rms_norm_eps)
    return x + linear(F.silu(linear(normed, layer.gate_proj)) * linear(normed, layer.up_proj), layer.down_proj)


def route(normed: Tensor, layer: Layer, c: ModelConfig) -> tuple[Tensor, Tensor]:
    """(weights [T, experts], zero where not chosen; chosen [T, experts] as bool), in fp32."""
    scores = torch.sigmoid(F.linear(normed.float(), layer.router.float()))
    ranked, chosen = scores + layer.router_bias, torch.zeros_like(scores, dtype=torch.bool)
    columns = torch.arange(scores.shape[-1], device=scores.device)
    for _ in range(c.num_experts_per_tok):
        best = ranked.argmax(-1, keepdim=True) == columns
        chosen, ranked = chosen | best, ranked.masked_fill(best, -math.inf)
    weights = scores * chosen
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor, chosen


@compiled
def moe(x: Tensor, o: Tensor, layer: Layer, c: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Adds attention output and experts to the rows; also (rows per expert, balance loss of the batch).

    All experts run as one wide SwiGLU whose hidden units are scaled by the route weights: cheap at these widths.
    """
    x = x + linear(o, layer.o_proj)
    normed = rms_norm(x, layer.post_attention_layernorm, c.rms_norm_eps)
    weights, chosen = route(normed, layer, c)
    e, i, h = layer.experts_gate.shape
    gate = torch.cat((layer.experts_gate.view(e * i, h), layer.shared_gate))
    up = torch.cat((layer.experts_up.view(e * i, h), layer.shared_up))
    down = torch.cat((layer.experts_down.permute(1, 0, 2).reshape(h, e * i), layer.shared_down), 1)
    scale = F.pad(weights, (0, 1), value=1.0).to(x.dtype)
    hidden = (F.silu(linear(normed, gate)) * linear(normed, up)).unflatten(-1, (e + 1, i)) * scale[..., None]
    load = chosen.float().mean(0)
    balance = (load.detach() * (weights / c.routed_scaling_factor).mean(0)).sum() * (e / c.num_experts_per_tok)
    return x + linear(hidden.flatten(-2), down), chosen.sum(0), balance


@compiled
def final_norm(x: Tensor, weight: Tensor, c: ModelConfig) -> Tensor:
    """The last norm of the target or of the MTP layer."""
    return rms_norm(x, weight, c.rms_norm_eps)


@compiled
def mtp_input(e: Tensor, g: Tensor, model: Model, c: ModelConfig) -> Tensor:
    """eh_proj of [enorm(embedding) ; hnorm(hidden)]."""
    return linear(torch.cat((rms_norm(e, model.enorm, c.rms_norm_eps), rms_norm(g, model.hnorm, c.rms_norm_eps)), -1),
                  model.eh_proj)


@compiled
def indexer_loss(index_q: Tensor, index_w: Tensor, index_k: Tensor, rows: Tensor, target: Tensor) -> Tensor:
    """Mean KL(target || softmax of index scores) over sampled rows.

    index_q [B, R, heads, D], index_w [B, R, heads], index_k [B, S, D], rows [R] positions, target [B, R, S] sums to 1.
    """
    dots = torch.matmul(index_q.flatten(1, 2), index_k.transpose(1, 2)).unflatten(1, index_q.shape[1:3])
    scores = (F.relu(dots).float() * index_w[..., None]).sum(2)
    visible = torch.arange(scores.shape[-1], device=scores.device) <= rows[:, None]
    log_q = torch.log_softmax(scores.masked_fill(~visible, -1e9), -1)
    return (target * (torch.log(target + 1e-9) - log_q)).sum(-1).mean()


@compiled
def attention_share(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Attention probabilities of sampled rows summed over heads: q [B, heads, R, D], k [B, heads, S, D] -> [B, R, S]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    visible = torch.arange(k.shape[2], device=k.device) <= rows[:, None]
    return torch.softmax(scores.masked_fill(~visible, -1e9), -1).sum(1)


def probe_loss(probe: Probe, rows: Tensor) -> Tensor:
    """The indexer loss of one probe; the target is the normalised attention of every layer the indexer serves."""
    with torch.no_grad():
        target = sum(attention_share(q, k, rows) for q, k in probe.served)
        target = target / target.sum(-1, keepdim=True)
    return indexer_loss(probe.index_q, probe.index_w, probe.index_k, rows, target)


class Runner:
    """One forward geometry: batch, length, whether attention is sparse, and which query rows the indexers learn from."""

    def __init__(self, model: Model, batch: int, length: int, sparse: bool, probe_rows: Tensor | None = None,
                 fp8_index: bool = False, dtype: torch.dtype = torch.bfloat16, attention: str = "flex") -> None:
        self.model, self.c, self.batch, self.length = model, model.config, batch, length
        self.sparse, self.rows, self.fp8_index, self.dtype, self.attention = sparse, probe_rows, fp8_index, dtype, attention
        device = model.norm.device
        cos, sin = rope_table(self.c, length + 16, device)
        self._tables = [tuple(t[s : s + length].repeat(batch, 1) for t in (cos, sin)) for s in range(8)]

    def tables(self, shift: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin per flattened row, for positions moved by `shift`."""
        return self._tables[shift]

    def heads_first(self, x: Tensor) -> Tensor:
        """[T, heads, D] -> [B, heads, S, D]."""
        return x.unflatten(0, (self.batch, self.length)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Causal attention over all keys (mask None) or over each row's selection; [T, heads * v]."""
        scale = self.c.qk_head_dim**-0.5
        if mask is None:
            out = attend_dense(q, k, v, scale)
        else:
            out = attend_selected(q, k, v, mask, scale, self.attention)
        return out.transpose(1, 2).reshape(self.batch * self.length, -1)

    def run_indexer(self, layer: Layer, normed: Tensor, q_lora: Tensor) -> tuple[Tensor | None, Probe | None]:
        """The selection mask [B, S, S] when sparse, and the probe when rows are sampled; inputs are detached."""
        indexer, (cos, sin), b, s = layer.indexer, self.tables(), self.batch, self.length
        normed, q_lora, mask, probe = normed.detach(), q_lora.detach(), None, None
        if not self.sparse and self.rows is None:
            return None, None
        k = index_keys(normed, indexer, self.c, cos, sin)
        if self.sparse and s > self.c.index_topk:
            with torch.no_grad():
                q, w = index_queries(normed, q_lora, indexer, self.c, cos, sin)
                k_used = k
                if self.fp8_index:
                    q, k_used = quantised(q), quantised(k)
                mask = select_mask(q.unflatten(0, (b, s)), k_used.unflatten(0, (b, s)), w.unflatten(0, (b, s)),
                                   self.c.index_topk)
        if self.rows is not None:
            flat = (torch.arange(b, device=normed.device)[:, None] * s + self.rows).flatten()
            q, w = index_queries(normed[flat], q_lora[flat], indexer, self.c, cos[flat], sin[flat])
            r = self.rows.numel()
            probe = Probe(q.unflatten(0, (b, r)), w.unflatten(0, (b, r)), k.unflatten(0, (b, s)))
        return mask, probe

    def serve(self, probe: Probe | None, q: Tensor, k: Tensor) -> None:
        """Adds one attention (heads-first q and k) to what the probe's indexer must predict."""
        if probe is not None:
            probe.served.append((q.detach()[:, :, self.rows], k.detach()))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embedding rows of flattened tokens."""
        return F.embedding(tokens, self.model.embed_tokens).to(self.dtype)

    def trunk(self, tokens: Tensor) -> tuple[Trunk, Tensor]:
        """Runs the target over tokens [B, S]; returns the trunk and the summed balance loss."""
        cos, sin = self.tables()
        x = self.embed(tokens.flatten())
        loads, probes, mask, probe = [], [], None, None
        total = torch.zeros((), device=x.device)
        for layer in self.model.layers:
            normed, q_lora, q = queries(x, layer, self.c, cos, sin)
            k, v = keys_values(normed, layer, self.c, cos, sin)
            q, k, v = self.heads_first(q), self.heads_first(k), self.heads_first(v)
            if layer.indexer is not None:
                mask, probe = self.run_indexer(layer, normed, q_lora)
                probes += [probe] if probe is not None else []
            self.serve(probe, q, k)
            o = self.attend(q, k, v, mask)
            if hasattr(layer, "router"):
                x, load, balance = moe(x, o, layer, self.c)
                loads.append(load)
                total = total + balance
            else:
                x = dense_mlp(x, o, layer, self.c)
        return Trunk(final_norm(x, self.model.norm, self.c), loads, probes), total

    def mtp_chain(self, hidden: Tensor, tokens: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor], Probe | None, Tensor]:
        """Teacher-forced MTP steps 0..steps-1 over target rows `hidden`; tokens [B, S + steps] hold the true text.

        Step s at row i reads token i + 1 + s, sits at position i + s, attends the step-0 rows j <= i (of row i's
        selection) and predicts token i + 2 + s. Returns post-norm rows per step, loads, the probe, the balance loss.
        """
        model, c, layer, b, s = self.model, self.c, self.model.mtp, self.batch, self.length
        g, outputs, loads = hidden, [], []
        mask = probe = k = v = None
        total = torch.zeros((), device=hidden.device)
        for step in range(steps):
            e = self.embed(tokens[:, 1 + step : 1 + step + s].flatten())
            if step == 0:
                first = (torch.arange(b * s, device=e.device) % s == 0)[:, None]
                e = e.masked_fill(first, 0.0)
            u = mtp_input(e, g, model, c)
            cos, sin = self.tables(step)
            normed, q_lora, q = queries(u, layer, c, cos, sin)
            q = self.heads_first(q)
            if step == 0:
                k, v = (self.heads_first(t) for t in keys_values(normed, layer, c, cos, sin))
                mask, probe = self.run_indexer(layer, normed, q_lora)
            self.serve(probe, q, k)
            u, load, balance = moe(u, self.attend(q, k, v, mask), layer, c)
            g = final_norm(u, model.shared_head_norm, c)
            loads.append(load)
            outputs.append(g)
            total = total + balance
        return outputs, loads, probe, total
