"""What leads to a selection: the prologue, index scores, top-k."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.ops.oracles.cache import VALUE_OF_CODE, index_row, latent_row, quantized_group
from tests.ops.oracles.gemm import linear_bf16_normed
from tests.ops.oracles.pointwise import layer_norm, rms_norm, rope_interleaved
from tests.ops.oracles.registry import double, oracle


@oracle
def quantize_index_query(q, gates):
    codes, folded = torch.zeros(q.shape, dtype=torch.float64), double(gates).clone()
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            written, scale = quantized_group(double(q)[row, head].tolist())
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
    groups = [quantized_group(row[at : at + width].tolist()) for at in range(0, row.shape[0], width)]
    return torch.cat([VALUE_OF_CODE[list(codes)] * scale for codes, scale in groups])


def _first_rotated(x, places):
    return rope_interleaved(x, places.cos, places.sin, 0)


@oracle
def prologue_shared(qkv, q, w_uk, norm, places, cache, whole=False):
    heads, nope, width = w_uk.shape
    latent = rms_norm(qkv[:, -width - 64 : -64], norm.weight, norm.eps).to(qkv.dtype)
    rope_key = _first_rotated(qkv[:, None, -64:], places)[:, 0].to(qkv.dtype)
    rows = torch.cat((double(latent), double(rope_key)), 1)
    if cache.dtype == torch.uint8:
        rows = torch.stack([torch.cat((_through_bytes(row[:512], 128), row[512:])) for row in rows])
    stored = _stored(cache, places.slots, rows, latent_row)
    q = q.view(-1, heads, nope + 64)
    into = double(q[..., :nope])
    if not whole:
        into = torch.einsum("thn,hnc->thc", into, double(w_uk))
    rope = rope_interleaved(q, places.cos, places.sin, nope)[..., nope:]
    return torch.cat((into, rope), -1), stored if cache.dtype == torch.uint8 else stored.view(cache.shape)


@oracle
def prologue_full(qkv, q, w_uk, norm, index_norm, places, cache, keys, whole=False):
    heads, nope = w_uk.shape[:2]
    shared = heads * (nope + 64)
    absorbed, stored = prologue_shared(qkv[:, :-160], q[:, :shared], w_uk, norm, places, cache, whole)
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
