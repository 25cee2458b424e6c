"""Products with a weight in each format."""

import torch

from tests.ops.oracles.pointwise import rms_norm
from tests.ops.oracles.registry import double, oracle


def fp8_values(weight, scale_inv):
    rows, columns = torch.arange(weight.shape[-2]) // 128, torch.arange(weight.shape[-1]) // 128
    return double(weight) * double(scale_inv)[..., rows[:, None], columns]


def nvfp4_values(packed, scale, scale_2):
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    out = torch.zeros(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.float64)
    for shift, odd in ((0, 0), (4, 1)):
        nibble = (packed.long() >> shift) & 15
        out[..., odd::2] = magnitudes[nibble & 7] * (1 - 2 * (nibble >> 3))
    return out * double(scale).repeat_interleave(16, -1) * double(scale_2)


def int4_values(packed, scale):
    out = torch.zeros(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.float64)
    for shift, odd in ((0, 0), (4, 1)):
        nibble = (packed.long() >> shift) & 15
        out[..., odd::2] = (nibble - 16 * (nibble >> 3)).double()
    return out * double(scale).repeat_interleave(128, -1)


def _product(x, weight, residual):
    out = double(x) @ weight.T
    return out if residual is None else out + double(residual)


@oracle
def linear_draft(x, weight):
    return double(x) @ double(weight).T


@oracle
def linear_bf16(x, weight, residual=None):
    return _product(x, double(weight), residual)


@oracle
def linear_bf16_normed(x, norm, eps, weight):
    return rms_norm(x, norm, eps) @ double(weight).T


@oracle
def linear_fp8_block_normed(x, norm, eps, weight, scale_inv):
    return rms_norm(x, norm, eps) @ fp8_values(weight, scale_inv).T


@oracle
def linear_bf16_best(x, weight, first, width):
    token = (double(x) @ double(weight)[:width].T).argmax(-1) + first
    return token, token


@oracle
def linear_fp8_block_best(x, weight, scale_inv, first, width):
    token = (double(x) @ fp8_values(weight, scale_inv)[:width].T).argmax(-1) + first
    return token, token


@oracle
def linear_swiglu(x, gate_up):
    gate, up = (double(x) @ double(gate_up).T).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@oracle
def linear_fp8_block(x, weight, scale_inv, residual=None):
    return _product(x, fp8_values(weight, scale_inv), residual)


@oracle
def linear_nvfp4(x, packed, scale, scale_2, residual=None):
    return _product(x, nvfp4_values(packed, scale, scale_2.reshape(-1, 1)), residual)


@oracle
def linear_int4(x, packed, scale, residual=None):
    return _product(x, int4_values(packed, scale), residual)


@oracle
def linear_heads(x, weight):
    return torch.stack([double(x)[:, head] @ double(weight)[head].T for head in range(weight.shape[0])], 1)
