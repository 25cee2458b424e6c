"""Attention over a selection, the router and the experts."""

import torch

from tests.ops.oracles.cache import latent_row
from tests.ops.oracles.gemm import fp8_values, int4_values, nvfp4_values
from tests.ops.oracles.registry import double, oracle


def _attention(row, slots, counts, cache, scale, scores_and_values):
    listed = [slot for slot in slots[row, : int(counts[row])].tolist() if slot >= 0]
    if not listed:
        return None
    tokens = torch.stack([latent_row(cache, slot) for slot in listed])
    scores, values = scores_and_values(tokens)
    weights = (scores * scale - (scores * scale).max(-1, keepdim=True).values).exp()
    return (weights / weights.sum(-1, keepdim=True)).unsqueeze(1) @ values


@oracle
def sparse_mla(q, cache, slots, counts, scale, latent_dim):
    out = torch.zeros(*q.shape[:2], latent_dim, dtype=torch.float64)
    for row in range(q.shape[0]):
        made = _attention(
            row, slots, counts, cache, scale, lambda t, row=row: (double(q)[row] @ t.T, t[None, :, :latent_dim])
        )
        if made is not None:
            out[row] = made.squeeze(1)
    return out


@oracle
def mark_selected(slots, counts, page_places, units):
    masks = [[[[0] * 8 for _ in range(2)] for _ in range(units)] for _ in range(-(-slots.shape[0] // 8))]
    for row in range(slots.shape[0]):
        for slot in slots[row, : int(counts[row])].tolist():
            page = int(page_places[slot // 64])
            token = page * 64 + slot % 64
            if slot >= 0 and page >= 0 and token < 128 * units:
                masks[row // 8][token // 128][token // 64 % 2][row % 8] |= 1 << token % 64
    signed = torch.tensor([n - (1 << 64) if n >> 63 else n for n in _flat(masks)], dtype=torch.int64)
    return signed.view(-1, units, 2, 8)


def _flat(nested):
    return [n for part in nested for n in _flat(part)] if isinstance(nested, list) else [nested]


@oracle
def masked_mha(q, kv, rope, lengths, masks, scale):
    nope = q.shape[2] - rope.shape[1]
    out = torch.zeros(*q.shape[:2], kv.shape[2] - nope, dtype=torch.float64)
    for row in range(q.shape[0]):
        place = row // 8
        seen = [
            n for n in range(min(int(lengths[place]), kv.shape[0]))
            if int(masks[place, n // 128, n // 64 % 2, row % 8]) >> n % 64 & 1
        ]  # fmt: skip
        for head in range(q.shape[1] if seen else 0):
            keys = torch.cat((double(kv)[seen, head, :nope], double(rope)[seen]), -1)
            weights = torch.softmax(keys @ double(q)[row, head] * scale, 0)
            out[row, head] = weights @ double(kv)[seen, head, nope:]
    return out


@oracle
def sparse_mha(q, kv_b, cache, slots, counts, scale):
    latent_dim, heads = kv_b.shape[-1], q.shape[1]
    nope = q.shape[-1] - (576 - latent_dim)
    out = torch.zeros(q.shape[0], heads, kv_b.shape[1] - nope, dtype=torch.float64)
    for row in range(q.shape[0]):

        def expand(tokens, row=row):
            made = torch.einsum("jc,hnc->hjn", tokens[:, :latent_dim], double(kv_b))
            keys = torch.cat((made[..., :nope], tokens[:, latent_dim:].expand(heads, -1, -1)), -1)
            return torch.einsum("hd,hjd->hj", double(q)[row], keys), made[..., nope:]

        made = _attention(row, slots, counts, cache, scale, expand)
        if made is not None:
            out[row] = made.squeeze(1)
    return out


@oracle
def route(x, weight, bias, k, scale):
    gates = 1 / (1 + (-(double(x) @ double(weight).T)).exp())
    ids = torch.tensor(
        [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in (gates + double(bias)).tolist()]
    )
    chosen = gates.gather(1, ids)
    return ids, chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale


def _experts(x, ids, weights, w13, w2):
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for row in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[row, choice])
            if expert >= 0:
                out[row] += float(weights[row, choice]) * (w2[expert] @ swiglu_row(w13[expert] @ double(x)[row]))
    return out


def swiglu_row(both):
    gate, up = both.chunk(2)
    return gate / (1 + (-gate).exp()) * up


def _shared(x, gate_up=None, down=None, gate_up_scale_inv=None, down_scale_inv=None):
    """What a shared expert adds to every row."""
    if gate_up is None:
        return 0
    if gate_up_scale_inv is not None:
        gate_up, down = fp8_values(gate_up, gate_up_scale_inv), fp8_values(down, down_scale_inv)
    return torch.stack([double(down) @ swiglu_row(double(gate_up) @ row) for row in double(x)])


@oracle
def moe_bf16(x, ids, weights, w13, w2, *shared):
    return _experts(x, ids, weights, double(w13), double(w2)) + _shared(x, *shared)


@oracle
def moe_fp8_block(x, ids, weights, w13, w13_scale_inv, w2, w2_scale_inv, *shared):
    return _experts(x, ids, weights, fp8_values(w13, w13_scale_inv), fp8_values(w2, w2_scale_inv)) + _shared(x, *shared)


@oracle
def moe_nvfp4(x, ids, weights, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, *shared):
    half = w13.shape[1] // 2
    w13 = torch.cat(
        (
            nvfp4_values(w13[:, :half], w13_scale[:, :half], w13_scale_2[:, 0].view(-1, 1, 1)),
            nvfp4_values(w13[:, half:], w13_scale[:, half:], w13_scale_2[:, 1].view(-1, 1, 1)),
        ),
        1,
    )
    return _experts(x, ids, weights, w13, nvfp4_values(w2, w2_scale, w2_scale_2.view(-1, 1, 1))) + _shared(x, *shared)


@oracle
def moe_int4(x, ids, weights, w13, w13_scale, w2, w2_scale, *shared):
    return _experts(x, ids, weights, int4_values(w13, w13_scale), int4_values(w2, w2_scale)) + _shared(x, *shared)
