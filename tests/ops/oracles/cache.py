"""The bytes of both caches, number by number."""

import math
import struct

import numpy as np
import torch
from torch import Tensor

from tests.ops.oracles.registry import double, oracle


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


SORTED_CODES = sorted((code for code in range(256) if code not in (127, 128, 255)), key=e4m3_value)
SORTED_VALUES = np.array([e4m3_value(code) for code in SORTED_CODES])


def nearest_e4m3(values: np.ndarray) -> bytes:
    """The codes nearest to numbers in [-448, 448], ties to the even code; what rounds to zero keeps its sign."""
    low = np.clip(np.searchsorted(SORTED_VALUES, values, side="right") - 1, 0, len(SORTED_CODES) - 2)
    below, above = values - SORTED_VALUES[low], SORTED_VALUES[low + 1] - values
    codes = np.array(SORTED_CODES)
    take_above = (above < below) | ((above == below) & (codes[low + 1] % 2 == 0))
    nearest = np.where(take_above, codes[low + 1], codes[low])
    return bytes(np.where((nearest == 0) & np.signbit(values), 128, nearest).astype(np.uint8))


def quantized_group(values: list[float]) -> tuple[bytes, float]:
    """-> (codes, power-of-two scale)."""
    amax = max(max(abs(value) for value in values), float(np.float32(1e-4)))
    ratio = float(np.float32(amax) / np.float32(448.0))
    scale = 2.0 ** math.ceil(math.log2(ratio))
    if scale / 2 >= ratio:
        scale /= 2
    return nearest_e4m3(np.clip(np.array(values) / scale, -448.0, 448.0)), scale


def _bf16(value: float) -> bytes:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@oracle
def store_latent(cache, latent, rope_key, slots):
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, 64)
        if cache.dtype != torch.uint8:
            cache[page, offset] = torch.cat((latent[row], rope_key[row])).to(cache.dtype)
            continue
        groups = [quantized_group(latent[row, first : first + 128].tolist()) for first in range(0, 512, 128)]
        written = b"".join(codes for codes, _ in groups) + struct.pack("<4f", *(scale for _, scale in groups))
        written += b"".join(_bf16(value) for value in rope_key[row].tolist())
        cache[page, offset] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    return cache


@oracle
def store_index_keys(cache, keys, slots):
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, 64)
        if cache.dtype != torch.uint8:
            cache[page, offset] = keys[row]
            continue
        codes, scale = quantized_group(keys[row].tolist())
        cache[page, 128 * offset : 128 * offset + 128] = torch.frombuffer(bytearray(codes), dtype=torch.uint8)
        scale_bytes = torch.frombuffer(bytearray(struct.pack("<f", scale)), dtype=torch.uint8)
        cache[page, 8192 + 4 * offset : 8192 + 4 * offset + 4] = scale_bytes
    return cache


VALUE_OF_CODE = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)


def latent_row(cache: Tensor, slot: int) -> Tensor:
    stored = cache[slot // 64, slot % 64]
    if cache.dtype != torch.uint8:
        return double(stored)
    raw = bytes(stored.tolist())
    latent = VALUE_OF_CODE[stored[:512].long()]
    scales = torch.tensor(struct.unpack("<4f", raw[512:528]), dtype=torch.float64).repeat_interleave(128)
    rope = [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(528, 656, 2)]
    return torch.cat((latent * scales, torch.tensor(rope, dtype=torch.float64)))


def index_row(cache: Tensor, page: int, offset: int) -> Tensor:
    if cache.dtype != torch.uint8:
        return double(cache[page, offset])
    codes = cache[page, 128 * offset : 128 * offset + 128].long()
    scale = struct.unpack("<f", bytes(cache[page, 8192 + 4 * offset : 8196 + 4 * offset].tolist()))[0]
    return VALUE_OF_CODE[codes] * scale


@oracle
def gather_latent(cache, slots):
    width = 576
    rows = [
        latent_row(cache, s) if s >= 0 else torch.zeros(width, dtype=torch.float64) for s in slots.view(-1).tolist()
    ]
    return torch.stack(rows).view(*slots.shape, width)


@oracle
def gather_index_pages(cache, page_ids):
    pages = [
        torch.stack([index_row(cache, page, offset) for offset in range(64)])
        if page >= 0
        else torch.zeros(64, 128, dtype=torch.float64)
        for page in page_ids.view(-1).tolist()
    ]
    return torch.stack(pages).view(*page_ids.shape, 64, 128)
