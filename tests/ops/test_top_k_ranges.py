"""Rows whose keys lie on several ranks: the merge of what each selects is the selection of the whole, to the bit."""

import itertools

import pytest
import torch

from legato.ops.case import Draw
from legato.ops.op import bind
from legato.ops.select import top_k
from legato.ops.select.adversarial import adversarial_rows
from legato.ops.select.ranges import best_of_range, merged

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def check(width: int, k: int, bounds: tuple[int, ...], device: str) -> None:
    """Every hard kind of row, each of another length, cut at `bounds`."""
    draw = Draw(torch.Generator(device).manual_seed(width), torch.device(device))
    rows = torch.stack(tuple(adversarial_rows(draw, width).values()))
    lengths = (width - 37 * torch.arange(len(rows), dtype=torch.int32, device=device)).clamp_min(0)
    lengths[3], lengths[5] = 0, 1
    pages = -(-width // 64)
    padded = torch.nn.functional.pad(rows, (0, pages * 64 - width), value=torch.inf)
    table = draw.distinct(2 * pages, 2 * pages).view(2, pages)
    request = torch.arange(len(rows), dtype=torch.int32, device=device) % 2
    parts = [
        best_of_range(padded[:, start:end].contiguous(), (lengths - start).clamp(0, end - start), k, start)
        for start, end in itertools.pairwise(bounds)
    ]
    found, expected = merged(parts, table, request), top_k.reference(padded, lengths, k, table, request)
    for kind, ours, theirs in zip(adversarial_rows(draw, 64), found[0], expected[0]):
        assert torch.equal(ours, theirs), kind
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("bounds", [(0, 700), (0, 350, 700), (0, 64, 128, 129, 640, 700), (0, 30, 700)])
def test_parts_merge_to_the_whole(bounds: tuple[int, ...]) -> None:
    check(700, 64, bounds, "cpu")


def test_a_part_must_be_there() -> None:
    with pytest.raises(ValueError, match="no parts"):
        merged([], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


@pytest.mark.gpu
@needs_gpu
def test_parts_merge_to_the_whole_on_hopper() -> None:
    """Eight ranks of 1M positions; ranges of many lengths; both with the kernel."""
    bind(("sm90",))
    try:
        check(40000, 2048, (0, 10000, 10064, 20000, 22048, 40000), "cuda")
        check(1 << 20, 2048, tuple(range(0, (1 << 20) + 1, 1 << 17)), "cuda")
    finally:
        bind(())
