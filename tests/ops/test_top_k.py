"""Selection on the rows that break selection kernels: ties, signed zeros, infinities, NaN, subnormals, order, narrow ranges."""

import math
import struct

import pytest
import torch
from torch import Tensor

from legato import ops
from legato.ops.select.ordering import first_k, ordered_keys


def select(values: list[float] | Tensor, k: int, length: int | None = None) -> list[int]:
    """Positions chosen from one row, through a page table that turns the pages round."""
    scores = torch.as_tensor(values, dtype=torch.float32)
    pages = -(-len(scores) // 64)
    # What lies beyond the row's length must not matter: the best of all.
    padded = torch.full((1, pages * 64), math.inf)
    padded[0, : len(scores)] = scores
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)[None]
    length = len(scores) if length is None else length
    lengths, request = torch.tensor([length], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    slots, counts = ops.top_k(padded, lengths, k, table, request)
    assert slots.shape == (1, k) and slots.dtype == counts.dtype == torch.int32
    count = int(counts[0])
    chosen = slots[0, :count].tolist()
    assert (slots[0, count:] == -1).all() and min(chosen, default=0) >= 0
    return [(pages - 1 - slot // 64) * 64 + slot % 64 for slot in chosen]


def expected(values: list[float], k: int) -> list[int]:
    order = sorted(
        range(len(values)), key=lambda at: (math.isnan(values[at]), 0 if math.isnan(values[at]) else -values[at], at)
    )
    return sorted(order[:k])


@pytest.mark.parametrize("k", [1, 7, 64, 200])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan, 1e-45])
def test_all_equal_takes_the_first(value: float, k: int) -> None:
    assert select([value] * 300, k) == list(range(k))


@pytest.mark.parametrize("length", [0, 1, 2, 62, 63, 64, 65, 66])
@pytest.mark.parametrize("k", [1, 64, 65])
def test_lengths_around_k(length: int, k: int) -> None:
    values = [math.sin(position * 12.9898) for position in range(130)]
    assert select(values, k, length) == expected(values[:length], k)


def test_a_row_no_longer_than_k_is_taken_whole() -> None:
    values = [math.nan, -math.inf, 3.0, -0.0, math.nan]
    assert select(values, 5) == [0, 1, 2, 3, 4]
    assert select(values, 100) == [0, 1, 2, 3, 4]


def test_a_long_table_and_a_short_row_beside_a_long_one() -> None:
    scores = torch.rand(2, 256)
    table = torch.arange(4, dtype=torch.int32)[None]
    lengths, request = torch.tensor([256, 3]), torch.tensor([0, 0])
    slots, counts = ops.top_k(scores, lengths, 8, table, request)
    assert counts.tolist() == [8, 3] and slots[1].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_signed_zeros_are_equal() -> None:
    zeros = [-0.0 if position % 3 else 0.0 for position in range(100)]
    assert select(zeros, 40) == list(range(40))
    assert select([-0.0, 1e-45, 0.0, -1e-45, -0.0], 3) == [0, 1, 2]


def test_order_at_the_ends() -> None:
    values = [-math.inf, math.nan, math.inf, -3.4e38, 3.4e38, 0.0, math.nan, -math.inf]
    assert select(values, 1) == [2]
    assert select(values, 4) == [2, 3, 4, 5]
    assert select(values, 5) == [0, 2, 3, 4, 5]
    assert select(values, 7) == [0, 1, 2, 3, 4, 5, 7]


def test_negative_and_payload_nans_rank_alike() -> None:
    patterns = [0xFFC00000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF]
    nans = [struct.unpack("<f", struct.pack("<I", pattern))[0] for pattern in patterns]
    values = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert values.isnan().all() and len(nans) == 5
    scores = torch.cat((values, torch.tensor([-math.inf])))
    assert select(scores, 3) == [0, 1, 5]


def test_subnormals_are_not_flushed() -> None:
    values = [position * 1.4e-45 for position in range(200)]
    assert select(values, 10) == list(range(190, 200))
    torch.set_flush_denormal(True)
    try:
        assert select(torch.tensor(values[::-1]), 10) == list(range(10))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("k", [1, 50, 256])
def test_ordered_rows(k: int) -> None:
    assert select([float(position) for position in range(1000)], k) == list(range(1000 - k, 1000))
    assert select([float(-position) for position in range(1000)], k) == list(range(k))


def test_a_very_narrow_range() -> None:
    """Neighbouring floats: what a key of 16 bits, or an affine one, would throw together."""
    base = struct.unpack("<I", struct.pack("<f", 65504.0))[0]
    bits = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).to(torch.int32) + base
    values = bits.view(torch.float32)
    assert select(values, 300) == expected(values.tolist(), 300)


def test_beyond_float16() -> None:
    values = [1e5 * (1 + position % 17) for position in range(500)]
    assert select(values, 100) == expected(values, 100)


@pytest.mark.parametrize("seed", range(6))
def test_many_ties_at_the_threshold(seed: int) -> None:
    """100 winners among 8220 zeros: the rows a ReLU sum really makes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.zeros(8320)
    winners = torch.randperm(8320, generator=generator)[:100]
    values[winners] = torch.rand(100, generator=generator)
    values[torch.randperm(8320, generator=generator)[:4000]] *= -1.0
    assert select(values, 2048) == expected(values.tolist(), 2048)


def test_rows_do_not_mix() -> None:
    """Rows of different requests and lengths, each as if it were alone."""
    generator = torch.Generator().manual_seed(1)
    scores = (torch.randn(9, 640, generator=generator) * 8).round() / 8
    table = torch.randperm(40, generator=generator)[:30].view(3, 10).to(torch.int32)
    lengths = torch.tensor([640, 1, 0, 63, 64, 65, 300, 129, 639], dtype=torch.int32)
    request = torch.tensor([0, 1, 2, 2, 1, 0, 2, 1, 0], dtype=torch.int32)
    slots, counts = ops.top_k(scores, lengths, 64, table, request)
    for row in range(9):
        chosen = expected(scores[row, : lengths[row]].tolist(), 64)
        physical = [int(table[request[row], at // 64]) * 64 + at % 64 for at in chosen]
        assert slots[row].tolist() == physical + [-1] * (64 - len(chosen)) and counts[row] == len(chosen)


def test_first_k_is_best_first() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, math.nan]])
    assert first_k(ordered_keys(values), 6)[0].tolist() == [1, 2, 0, 3, 4, 5]
