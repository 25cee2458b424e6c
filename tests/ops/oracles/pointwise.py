"""Norms, rotations, the inputs of layers and sums over ranks."""

import torch

from tests.ops.oracles.registry import double, oracle


@oracle
def rms_norm(x, weight, eps):
    x = double(x)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * double(weight)


@oracle
def layer_norm(x, weight, bias, eps):
    x = double(x)
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * double(weight) + double(bias)


@oracle
def rope_angles(positions, theta, dim):
    # Rounded to float32 where it is rounded: the frequency and the angle.
    frequencies = torch.pow(theta, -torch.arange(0, dim, 2, dtype=torch.float64) / dim).to(torch.float32)
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.double().cos(), angles.double().sin()


def _rotated(x, cos, sin, start, first, second):
    out = double(x).clone()
    cos, sin = double(cos)[:, None], double(sin)[:, None]
    a, b = double(x)[..., [start + i for i in first]], double(x)[..., [start + i for i in second]]
    out[..., [start + i for i in first]] = a * cos - b * sin
    out[..., [start + i for i in second]] = a * sin + b * cos
    return out


@oracle
def rope_interleaved(x, cos, sin, start):
    half = cos.shape[-1]
    return _rotated(x, cos, sin, start, range(0, 2 * half, 2), range(1, 2 * half, 2))


@oracle
def rope_half(x, cos, sin, start):
    half = cos.shape[-1]
    return _rotated(x, cos, sin, start, range(half), range(half, 2 * half))


@oracle
def add_rms_norm(x, delta, weight, eps):
    h = (double(x) + double(delta)).to(x.dtype)  # rounded where the contract rounds it
    return h, rms_norm(h, weight, eps)


@oracle
def all_reduce_add_norm(partial, residual, weight, eps, exchange):
    everyone = torch.stack([double(one) for one in (*exchange.before, partial, *exchange.after)])
    h = (everyone.sum(0) + double(residual)).to(residual.dtype)
    return h, rms_norm(h, weight, eps)


@oracle
def all_gather(shard, exchange):
    return torch.cat([one[None] for one in (*exchange.before, shard, *exchange.after)])


@oracle
def embed_norm(ids, embed, weight, eps):
    h = torch.stack([embed[token] for token in ids.tolist()])
    return h, rms_norm(h, weight, eps)


@oracle
def mtp_inputs(ids, positions, hidden, embed, enorm, hnorm, eps):
    rows = [double(embed)[token] if position else double(embed)[0] * 0 for token, position in zip(ids, positions)]
    return torch.cat((rms_norm(torch.stack(rows), enorm, eps), rms_norm(hidden, hnorm, eps)), 1)


@oracle
def mtp_looked_up(ids, positions, hidden, table, hnorm, eps):
    rows = [double(table)[token] if position else double(table)[0] * 0 for token, position in zip(ids, positions)]
    return torch.stack(rows), rms_norm(hidden, hnorm, eps)


@oracle
def swiglu(gate_up):
    gate, up = double(gate_up).chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up
