"""Scalar references of the weight formats: plain Python over single bytes, sharing nothing with the code under test.

float32 arithmetic is emulated by rounding exact doubles once: the product of two floats of at most 24 + 24 bits fits a
double.
"""

from __future__ import annotations

import struct

import torch

Tensors = dict[str, torch.Tensor]
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(byte: int) -> float:
    """One e4m3fn byte: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities, 0x7F and 0xFF are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(nibble: int) -> float:
    """One e2m1 nibble: sign in bit 3."""
    return (-1.0 if nibble & 8 else 1.0) * _E2M1[nibble & 7]


def signed4(nibble: int) -> int:
    """Two's-complement nibble."""
    return nibble - 16 if nibble & 8 else nibble


def f32(value: float) -> float:
    """The nearest float32, ties to even."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _bytes(tensor: torch.Tensor) -> list[list[int]]:
    return tensor.contiguous().view(torch.uint8).tolist()


def fp8_block(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, K]: e4m3 * scale of its 128 x 128 block."""
    codes, scales = _bytes(weight), scale.float().tolist()
    rows = [[f32(e4m3(byte) * scales[n // 128][k // 128]) for k, byte in enumerate(row)] for n, row in enumerate(codes)]
    return torch.tensor(rows, dtype=torch.float32)


def nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """[N, K]: e2m1 * block scale * global scale; low nibble first. e2m1 * e4m3 is exact, so there is one rounding."""
    codes, scales, top = _bytes(packed), _bytes(scale), float(scale_2)
    rows = []
    for n, row in enumerate(codes):
        values = [e2m1(nibble) for byte in row for nibble in (byte & 15, byte >> 4)]
        rows.append([f32(value * e4m3(scales[n][k // 16]) * top) for k, value in enumerate(values)])
    return torch.tensor(rows, dtype=torch.float32)


def int4_nibbles(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, K] from bytes: low nibble first, two's complement, groups of 128."""
    scales = scale.float().tolist()
    rows = []
    for n, row in enumerate(_bytes(weight)):
        values = [signed4(nibble) for byte in row for nibble in (byte & 15, byte >> 4)]
        rows.append([f32(value * scales[n][k // 128]) for k, value in enumerate(values)])
    return torch.tensor(rows, dtype=torch.float32)


def int4_packed(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, K] from int32 words: eight nibbles, lowest bits first, minus 8, groups of 128."""
    scales = scale.float().tolist()
    rows = []
    for n, row in enumerate(weight.tolist()):
        values = [((word >> (4 * i)) & 15) - 8 for word in row for i in range(8)]
        rows.append([f32(value * scales[n][k // 128]) for k, value in enumerate(values)])
    return torch.tensor(rows, dtype=torch.float32)


def dequantize_parts(parts: Tensors, kind: str) -> torch.Tensor:
    """One linear from its parts on disk."""
    if kind == "fp8":
        return fp8_block(parts["weight"], parts["weight_scale_inv"])
    if kind == "nvfp4":
        return nvfp4(parts["weight"], parts["weight_scale"], parts["weight_scale_2"])
    if kind == "int4-packed":
        return int4_packed(parts["weight_packed"], parts["weight_scale"])
    return int4_nibbles(parts["weight"], parts["weight_scale_inv"])
