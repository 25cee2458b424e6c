"""Every reference against a second account of the same op: float64, written for clarity, sharing no code with it.

Ops whose result is a choice (top_k, verify, slots, bytes) are compared exactly. Every case that a CPU can run is used,
with memory that is NaN until it is written.
"""

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from legato.ops.case import Case, difference
from legato.ops.catalog import cases

ORACLES: dict[str, Callable] = {}


def oracle(function: Callable) -> Callable:
    ORACLES[function.__name__] = function
    return function


def double(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.float64)


@pytest.mark.parametrize("case", [case for case in cases() if case.on == "any"], ids=lambda case: case.name)
def test_reference_agrees_with_float64(case: Case, uninitialised_is_nan: None) -> None:
    expected = ORACLES[case.op.name](*case.inputs())
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = case.outputs(case.op.reference, case.inputs())
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_floating_point() == theirs.is_floating_point()
        problem = difference(ours, theirs, case.tolerance)
        assert problem is None, problem


def test_every_op_has_an_oracle() -> None:
    assert {case.op.name for case in cases()} == set(ORACLES)


# ---------------------------------------------------------------------------------------------------------- pointwise


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


# --------------------------------------------------------------------------------------------------------------- gemm


def _fp8(weight, scale_inv):
    rows, columns = torch.arange(weight.shape[-2]) // 128, torch.arange(weight.shape[-1]) // 128
    return double(weight) * double(scale_inv)[..., rows[:, None], columns]


def _nvfp4(packed, scale, scale_2):
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    out = torch.zeros(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.float64)
    for shift, odd in ((0, 0), (4, 1)):
        nibble = (packed.long() >> shift) & 15
        out[..., odd::2] = magnitudes[nibble & 7] * (1 - 2 * (nibble >> 3))
    return out * double(scale).repeat_interleave(16, -1) * double(scale_2)


def _int4(packed, scale):
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
    return rms_norm(x, norm, eps) @ _fp8(weight, scale_inv).T


@oracle
def linear_bf16_best(x, weight, first, width):
    token = (double(x) @ double(weight)[:width].T).argmax(-1) + first
    return token, token


@oracle
def linear_fp8_block_best(x, weight, scale_inv, first, width):
    token = (double(x) @ _fp8(weight, scale_inv)[:width].T).argmax(-1) + first
    return token, token


@oracle
def linear_swiglu(x, gate_up):
    gate, up = (double(x) @ double(gate_up).T).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@oracle
def linear_fp8_block(x, weight, scale_inv, residual=None):
    return _product(x, _fp8(weight, scale_inv), residual)


@oracle
def linear_nvfp4(x, packed, scale, scale_2, residual=None):
    return _product(x, _nvfp4(packed, scale, scale_2.reshape(-1, 1)), residual)


@oracle
def linear_int4(x, packed, scale, residual=None):
    return _product(x, _int4(packed, scale), residual)


@oracle
def linear_heads(x, weight):
    return torch.stack([double(x)[:, head] @ double(weight)[head].T for head in range(weight.shape[0])], 1)


# -------------------------------------------------------------------------------------------------------------- cache


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


def _group(values: list[float]) -> tuple[bytes, float]:
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
        groups = [_group(latent[row, first : first + 128].tolist()) for first in range(0, 512, 128)]
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
        codes, scale = _group(keys[row].tolist())
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


# ------------------------------------------------------------------------------------------- prologue, score, select


@oracle
def quantize_index_query(q, gates):
    codes, folded = torch.zeros(q.shape, dtype=torch.float64), double(gates).clone()
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            written, scale = _group(double(q)[row, head].tolist())
            codes[row, head] = VALUE_OF_CODE[list(written)]
            folded[row, head] *= scale
    return codes, folded


def _stored(cache: Tensor, slots: Tensor, rows: Tensor, read: Callable) -> Tensor:
    """The whole cache as numbers, with `rows` at `slots`."""
    whole = torch.stack([read(cache, slot) for slot in range(cache.shape[0] * 64)])
    for row, slot in zip(rows, slots.tolist()):
        if slot >= 0:
            whole[slot] = row.to(cache.dtype) if cache.is_floating_point() else row
    return whole


def _through_bytes(row: Tensor, width: int) -> Tensor:
    """`row` rounded to e4m3 in groups of `width`."""
    groups = [_group(row[at : at + width].tolist()) for at in range(0, row.shape[0], width)]
    return torch.cat([VALUE_OF_CODE[list(codes)] * scale for codes, scale in groups])


def _first_rotated(x, places):
    return rope_interleaved(x, places.cos, places.sin, 0)


@oracle
def prologue_shared(qkv, q, w_uk, norm, places, cache):
    heads, nope, width = w_uk.shape
    latent = rms_norm(qkv[:, -width - 64 : -64], norm.weight, norm.eps).to(qkv.dtype)
    rope_key = _first_rotated(qkv[:, None, -64:], places)[:, 0].to(qkv.dtype)
    rows = torch.cat((double(latent), double(rope_key)), 1)
    if cache.dtype == torch.uint8:
        rows = torch.stack([torch.cat((_through_bytes(row[:512], 128), row[512:])) for row in rows])
    stored = _stored(cache, places.slots, rows, latent_row)
    q = q.view(-1, heads, nope + 64)
    into = torch.einsum("thn,hnc->thc", double(q[..., :nope]), double(w_uk))
    rope = rope_interleaved(q, places.cos, places.sin, nope)[..., nope:]
    return torch.cat((into, rope), -1), stored if cache.dtype == torch.uint8 else stored.view(cache.shape)


@oracle
def prologue_full(qkv, q, w_uk, norm, index_norm, places, cache, keys):
    heads, nope = w_uk.shape[:2]
    shared = heads * (nope + 64)
    absorbed, stored = prologue_shared(qkv[:, :-160], q[:, :shared], w_uk, norm, places, cache)
    key = layer_norm(qkv[:, -160:-32], index_norm.weight, index_norm.bias, index_norm.eps).to(qkv.dtype)
    key = double(_first_rotated(key[:, None], places)[:, 0].to(qkv.dtype))
    queries = _first_rotated(q[:, shared:].view(-1, 32, 128), places).to(qkv.dtype)
    gates = double(qkv[:, -32:]) / 64
    if keys.dtype == torch.uint8:
        key = torch.stack([_through_bytes(row, 128) for row in key])
        queries, gates = quantize_index_query(queries, gates)
    written = _stored(keys, places.slots, key, lambda cache, slot: index_row(cache, slot // 64, slot % 64))
    return absorbed, queries, gates, stored, written.view(-1, 64, 128)


@oracle
def prologue_bf16(x, qkv_weight, q_weight, w_uk, q_norm, norm, index_norm, places, cache, keys):
    qkv = (double(x) @ double(qkv_weight).T).to(x.dtype)
    q = linear_bf16_normed(qkv[:, : q_norm.weight.shape[0]], q_norm.weight, q_norm.eps, q_weight).to(x.dtype)
    if index_norm is None:
        return prologue_shared(qkv, q, w_uk, norm, places, cache)
    q, queries, gates, cache, keys = prologue_full(qkv, q, w_uk, norm, index_norm, places, cache, keys)
    stored = keys.view(-1, 128)[places.slots[places.slots >= 0].long()]
    scores = [sum(gates[row, :, None] / 4 * (queries[row] @ stored.T).clamp_min(0)) for row in range(len(q))]
    return q, torch.stack(scores), cache


@oracle
def index_scores(q, gates, cache, page_table, request, lengths):
    scores = torch.full((q.shape[0], page_table.shape[1] * 64), -math.inf, dtype=torch.float64)
    keys: dict[int, Tensor] = {}
    for row in range(q.shape[0]):
        owner = int(request[row])
        if owner not in keys:
            pages = page_table[owner].tolist()
            keys[owner] = torch.stack([index_row(cache, page, offset) for page in pages for offset in range(64)])
        length = int(lengths[row])
        dots = double(q)[row] @ keys[owner][:length].T
        scores[row, :length] = double(gates)[row] @ dots.clamp_min(0)
    return scores


def best_positions(values: list[float], k: int) -> list[int]:
    """The k best, NaN last, equal values (and -0.0 and 0.0) by position; in ascending position."""
    order = sorted(
        range(len(values)), key=lambda at: (math.isnan(values[at]), 0.0 if math.isnan(values[at]) else -values[at], at)
    )
    return sorted(order[:k])


@oracle
def top_k(scores, lengths, k, page_table, request):
    slots, counts = (
        torch.full((scores.shape[0], k), -1, dtype=torch.int64),
        torch.zeros(scores.shape[0], dtype=torch.int64),
    )
    for row in range(scores.shape[0]):
        length = int(lengths[row])
        chosen = best_positions(scores[row, :length].tolist(), k)
        counts[row] = len(chosen)
        pages = page_table[int(request[row])].tolist()
        for at, position in enumerate(chosen):
            slots[row, at] = pages[position // 64] * 64 + position % 64
    return slots, counts


# ---------------------------------------------------------------------------------------------------- attend, experts


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
def mark_selected(slots, counts, page_places, units, rows):
    masks = [[[[0] * rows for _ in range(2)] for _ in range(units)] for _ in range(slots.shape[0] // rows)]
    for row in range(slots.shape[0]):
        for slot in slots[row, : int(counts[row])].tolist():
            page = int(page_places[slot // 64])
            token = page * 64 + slot % 64
            if slot >= 0 and page >= 0 and token < 128 * units:
                masks[row // rows][token // 128][token // 64 % 2][row % rows] |= 1 << token % 64
    signed = torch.tensor([n - (1 << 64) if n >> 63 else n for n in _flat(masks)], dtype=torch.int64)
    return signed.view(-1, units, 2, rows)


def _flat(nested):
    return [n for part in nested for n in _flat(part)] if isinstance(nested, list) else [nested]


@oracle
def masked_mla(q, cache, tokens, lengths, masks, scale, latent_dim):
    out, each = torch.zeros(*q.shape[:2], latent_dim, dtype=torch.float64), masks.shape[3]
    for row in range(q.shape[0]):
        place = row // each
        seen = [
            n for n in range(min(int(lengths[place]), tokens.shape[0]))
            if int(masks[place, n // 128, n // 64 % 2, row % each]) >> n % 64 & 1
        ]  # fmt: skip
        slots = tokens[seen].view(1, -1)
        made = _attention(
            0,
            slots,
            torch.tensor([len(seen)]),
            cache,
            scale,
            lambda t, row=row: (double(q)[row] @ t.T, t[None, :, :latent_dim]),
        )
        if made is not None:
            out[row] = made.squeeze(1)
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
        gate_up, down = _fp8(gate_up, gate_up_scale_inv), _fp8(down, down_scale_inv)
    return torch.stack([double(down) @ swiglu_row(double(gate_up) @ row) for row in double(x)])


@oracle
def moe_bf16(x, ids, weights, w13, w2, *shared):
    return _experts(x, ids, weights, double(w13), double(w2)) + _shared(x, *shared)


@oracle
def moe_fp8_block(x, ids, weights, w13, w13_scale_inv, w2, w2_scale_inv, *shared):
    return _experts(x, ids, weights, _fp8(w13, w13_scale_inv), _fp8(w2, w2_scale_inv)) + _shared(x, *shared)


@oracle
def moe_nvfp4(x, ids, weights, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, *shared):
    half = w13.shape[1] // 2
    w13 = torch.cat(
        (
            _nvfp4(w13[:, :half], w13_scale[:, :half], w13_scale_2[:, 0].view(-1, 1, 1)),
            _nvfp4(w13[:, half:], w13_scale[:, half:], w13_scale_2[:, 1].view(-1, 1, 1)),
        ),
        1,
    )
    return _experts(x, ids, weights, w13, _nvfp4(w2, w2_scale, w2_scale_2.view(-1, 1, 1))) + _shared(x, *shared)


@oracle
def moe_int4(x, ids, weights, w13, w13_scale, w2, w2_scale, *shared):
    return _experts(x, ids, weights, _int4(w13, w13_scale), _int4(w2, w2_scale)) + _shared(x, *shared)


# ------------------------------------------------------------------------------------------------------- sample, rows


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds on Python integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & 0xFFFFFFFF, (p >> 32) ^ d ^ m, p & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@oracle
def gumbel(seed, position, vocab):
    rows = []
    for key, place in zip((seed.long() & (2**64 - 1 >> 1)).tolist(), position.tolist(), strict=True):
        key += 0 if int(seed[len(rows)]) >= 0 else 1 << 63
        words: list[int] = []
        for block in range(-(-vocab // 4)):
            words += philox([block, 0, place & 0xFFFFFFFF, place >> 32], [key & 0xFFFFFFFF, key >> 32])
        rows.append([-math.log(-math.log(((word >> 9) + 0.5) / 2**23)) for word in words[:vocab]])
    return torch.tensor(rows, dtype=torch.float64)


@oracle
def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    noise = gumbel(seed, position, logits.shape[1])
    tokens = []
    for row in range(logits.shape[0]):
        values = logits[row].double().tolist()
        order = sorted(range(len(values)), key=lambda token: (-values[token], token))
        if temperature[row] == 0:
            tokens.append(order[0])
            continue
        scaled = [value / float(temperature[row]) for value in values]
        order = order[: int(top_k[row]) or None]
        weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
        shares, reached, kept = [weight / sum(weights) for weight in weights], 0.0, []
        for token, share in zip(order, shares, strict=True):
            if kept and top_p[row] < 1 and reached >= float(top_p[row]):
                break
            reached += share
            if share >= float(min_p[row]) * shares[0]:
                kept.append(token)
        tokens.append(max(kept, key=lambda token: (scaled[token] + float(noise[row, token]), -token)))
    return torch.tensor(tokens)


@oracle
def penalize(logits, generated, in_prompt, repetition, frequency, presence):
    out = double(logits)
    for row in range(out.shape[0]):
        for token in range(out.shape[1]):
            times, value = int(generated[row, token]), float(out[row, token])
            if times or bool(in_prompt[row, token]):
                value = value / float(repetition[row]) if value > 0 else value * float(repetition[row])
            if times:
                value -= float(frequency[row]) * times + float(presence[row])
            out[row, token] = value
    return out


@oracle
def verify(sampled, drafts, num_drafts):
    accepted = []
    for row in range(sampled.shape[0]):
        count = 0
        while count < int(num_drafts[row]) and sampled[row, count] == drafts[row, count]:
            count += 1
        accepted.append(count)
    return torch.tensor(accepted)


@oracle
def likelihood(logits, tokens):
    return double(logits).softmax(1).gather(1, tokens[:, None])[:, 0]


@oracle
def logprobs(logits, tokens, top):
    values = double(logits) - double(logits).exp().sum(-1, keepdim=True).log()
    ids = [sorted(range(logits.shape[1]), key=lambda token: (-row[token], token))[:top] for row in logits.tolist()]
    ids = torch.tensor(ids, dtype=torch.int64).view(logits.shape[0], top)
    return values.gather(1, tokens[:, None])[:, 0], ids, values.gather(1, ids)


@oracle
def cache_slots(page_table, rows, positions):
    slots = []
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        inside = row >= 0 and 0 <= position < 64 * page_table.shape[1]
        page = int(page_table[row, position // 64]) if inside else -1
        slots.append(page * 64 + position % 64 if page >= 0 else -1)
    return torch.tensor(slots)


@oracle
def gather_rows(tokens, lengths, rows, depth):
    pairs = list(zip(rows.tolist(), depth.tolist(), strict=True))
    ids = [int(tokens[row, at]) for row, at in pairs]
    return torch.tensor(ids), torch.tensor([int(lengths[row]) + at for row, at in pairs])


@oracle
def advance_rows(tokens, lengths, done, drafted, rows, base, sampled, counts, ended, drafts, likely, threshold):
    for request, row in enumerate(rows.tolist()):
        count = int(counts[request])
        if count:
            tokens[row, 0] = sampled[request, count - 1]
            mine = [] if drafts is None else drafts[request].tolist()
            for at, draft in enumerate(mine):
                tokens[row, 1 + at] = draft
            together, made = 1.0, 0
            for at in range(len(mine)):
                together *= 1.0 if likely is None else float(likely[request, at])
                made += together >= threshold
            drafted[row] = made
        lengths[row] = int(base[request]) + count
        done[row] = bool(ended[request])
    return tokens, lengths, done, drafted


@oracle
def decode_rows(places, tokens, lengths, done, num_drafts, drafted, page_table, width, theta, rope_dim):
    ids, positions, rows, slots = [], [], [], []
    most = [min(int(asked), int(made), width - 1) for asked, made in zip(num_drafts, drafted, strict=True)]
    for place in places.tolist():
        row = place or int(places[0])
        for depth in range(width):
            at = depth if depth <= most[row] else 0
            ids.append(int(tokens[row, at]))
            rows.append(row)
            positions.append(int(lengths[row]) + at)
            slot = cache_slots(page_table, torch.tensor(rows[-1:]), torch.tensor(positions[-1:]))
            slots.append(-1 if done[place] or at != depth else int(slot))
    at = torch.tensor(positions)
    offered = torch.tensor([most[place] for place in places.tolist()])
    stands = torch.tensor(ids), at, torch.tensor(rows), at + 1, torch.tensor(slots), *rope_angles(at, theta, rope_dim)
    return *stands, torch.tensor([int(lengths[place]) for place in places.tolist()]), offered


@oracle
def chain_rows(places, base, counts, num_steps, theta, rope_dim):
    requests = list(zip(base.tolist(), counts.tolist(), strict=True))
    positions = torch.tensor(
        [at + max(count - 1, 0) + step for step in range(1, num_steps + 1) for at, count in requests]
    )
    rows = torch.tensor(places.tolist() * num_steps)
    nowhere = torch.full_like(rows, -1)
    return positions, rows, positions + 1, nowhere, *rope_angles(positions, theta, rope_dim)


@oracle
def accept_rows(sampled, drafts, num_drafts, rows, base, max_lengths, capacity, stop_ids, done):
    lines = []
    for request, row in enumerate(rows.tolist()):
        mine, offered = sampled[request].tolist(), drafts[request].tolist()[: int(num_drafts[request])]
        accepted = 0
        while accepted < len(offered) and mine[accepted] == offered[accepted]:
            accepted += 1
        emitted, ended, position = 0, int(base[request]) + 1 >= int(max_lengths[row]), int(base[request])
        stops = {token for token in stop_ids[row].tolist() if token >= 0}
        while emitted <= accepted and not ended and position < int(capacity[row]):
            position += 1
            ended = mine[emitted] in stops or position + 1 >= int(max_lengths[row])
            emitted += 1
        was_done = bool(done[row])
        lines.append((accepted, 0 if was_done else emitted, ended or was_done, not was_done))
    accepted, counts, ended, live = zip(*lines, strict=True)
    return torch.tensor(accepted), torch.tensor(counts), torch.tensor(ended), torch.tensor(live)


@oracle
def extend_rows(sampled, counts, row_index, sampler_of, offset, next_ids, slots):
    following, stored = next_ids.tolist(), slots.tolist()
    for row, (request, at) in enumerate(zip(sampler_of.tolist(), offset.tolist(), strict=True)):
        if request >= 0:
            following[row] = int(sampled[request, at])
            stored[row] = -1 if at >= int(counts[request]) else stored[row]
    seed = [int(row_index[request, max(int(count) - 1, 0)]) for request, count in enumerate(counts)]
    return torch.tensor(following), torch.tensor(stored), torch.tensor(seed)


@oracle
def seed_rows(hidden, slots, counts, seed):
    return tuple(torch.stack([rows[at] for at in seed.tolist()]) for rows in (hidden, slots, counts))


@oracle
def write_letter(letters, number, sampled, drafts, counts, accepted, offered, ended, live):
    number += 1
    columns = (counts, accepted, offered, ended, live)
    facts = zip(sampled.tolist(), drafts.tolist(), *(column.tolist() for column in columns), strict=True)
    for request, (tokens, following, *others) in enumerate(facts):
        line = [*tokens, *following, *map(int, others), int(number)]
        letters[int(number) % len(letters), request] = torch.tensor(line)
    return letters, number


@oracle
def greedy_keys(logits, first):
    if not logits.shape[1]:
        return torch.full((len(logits),), -(1 << 63))
    keys = []
    for row in logits.float().tolist():
        bits = int.from_bytes(struct.pack("<f", max(row) + 0.0), "little")
        ordered = bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000
        keys.append((ordered << 32 | (0xFFFFFFFF - first - row.index(max(row)))) - (1 << 63))
    return torch.tensor(keys)


@oracle
def best_of_keys(keys):
    return torch.tensor([0xFFFFFFFF - max(column) % (1 << 32) for column in keys.T.tolist()])


@oracle
def greedy(logits):
    return torch.tensor([row.index(max(row)) for row in logits.tolist()])
