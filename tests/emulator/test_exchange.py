"""One rank's call of the sum over ranks with its peers' words already there: what it adds, sends, empties and counts, bit by bit.

The emulator runs one kernel at a time, so ranks that wait for each other are tested on a GPU (tests/ops/test_reduce_sm90.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("tests.emulator.native")

from legato.ops.reduce import Recorded, all_reduce_add_norm, inbox, sm90
from legato.ops.reduce.inbox import ALARM_WORDS, EMPTY_BYTE, HEADER_BYTES, Inbox, InboxShape
from tests.emulator.launch import emulated

EPS = 1e-5
COUNTS_AT = 8 * inbox.MOST_RANKS + 32 + 4 * inbox.GATHER_BLOCKS
"""Where in the header the calls of each row stand."""


class Rank:
    """A rank whose peers' inboxes are other memory of the same process; `calls` were made of every row."""

    def __init__(self, shape: InboxShape, rank: int, calls: int) -> None:
        self.shape, self.rank = shape, rank
        self.memory = [torch.full((shape.words_at,), EMPTY_BYTE, dtype=torch.uint8) for _ in range(shape.num_ranks)]
        alarm = torch.zeros(ALARM_WORDS, dtype=torch.int32)
        addresses = [memory.data_ptr() for memory in self.memory]
        header = bytearray(shape.header(addresses, alarm.data_ptr(), 10**9))
        header[COUNTS_AT : COUNTS_AT + 4 * shape.rows] = calls.to_bytes(4, "little") * shape.rows
        self.memory[rank][:HEADER_BYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))
        self.inbox = Inbox(rank, shape, addresses[rank], alarm, Recorded((), ()))

    def received(self, rank: int) -> Tensor:
        """[3, N, rows, D] int16: what stands in a rank's inbox, by buffer and sender."""
        shape = self.shape
        words = self.memory[rank][HEADER_BYTES:].view(torch.int16)
        return words.view(3, shape.num_ranks, shape.rows, shape.width)

    @property
    def counts(self) -> list[int]:
        return self.memory[self.rank][COUNTS_AT : COUNTS_AT + 4 * self.shape.rows].view(torch.int32).tolist()

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(memory.data_ptr(), memory.data_ptr() + memory.nbytes) for memory in self.memory]


def sendable(partial: Tensor) -> Tensor:
    """As words travel: a pair of NaNs of all ones becomes another pair of NaNs."""
    words = partial.view(torch.int32)
    return torch.where(words == -1, 0x7FFFFFFF, words).view(torch.int16)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("ranks", "rank", "rows", "width", "blocks"),
    [
        *((8, 5, 2, 2048, 8), (8, 0, 2, 512, 2), (5, 4, 2, 256, 1), (4, 1, 2, 1024, 4), (2, 1, 9, 512, 1)),
        *(pytest.param(*made, marks=pytest.mark.full) for made in ((8, 7, 3, 6144, 8), (2, 0, 1, 6144, 8))),
    ],
)
def test_a_sum_adds_sends_empties_and_counts(
    ranks: int, rank: int, rows: int, width: int, blocks: int, seed: int
) -> None:
    shape = InboxShape(ranks, width, rows + 2)
    assert sm90.blocks(shape, rows) == blocks
    calls, draw = 4, torch.Generator().manual_seed(seed)
    made = Rank(shape, rank, calls)
    weight = (1 + 0.3 * torch.randn(width, generator=draw)).bfloat16()
    for call in (calls, calls + 1):
        residual, *parts = (torch.randn(rows, width, generator=draw).bfloat16() for _ in range(ranks + 1))
        parts[0][0, :2] = float("nan")
        parts[-1].view(torch.int32)[-1, 1] = -1
        own, now, before = made.received(rank), call % 3, (call + 2) % 3
        peers = [peer for peer in range(ranks) if peer != rank]
        for peer in peers:
            own[now, peer, :rows] = sendable(parts[peer])
        own[before, :, :rows] = 7
        with torch.inference_mode(), emulated(seed) as emulation:
            emulation.ranges += made.ranges
            h, normed = sm90.all_reduce_add_norm_sm90(parts[rank], residual, weight, EPS, made.inbox)
        expected = all_reduce_add_norm.reference(parts[0], residual, weight, EPS, Recorded((), tuple(parts[1:])))
        assert torch.equal(h.nan_to_num(nan=7.0), expected[0].nan_to_num(nan=7.0))
        torch.testing.assert_close(normed, expected[1], rtol=2**-7, atol=2**-8, equal_nan=True)
        for peer in peers:
            assert torch.equal(made.received(peer)[now, rank, :rows], sendable(parts[rank])), f"sent to {peer}"
            assert (own[before, peer, :rows] == -1).all(), "what the call before brought is gone"
            assert torch.equal(own[now, peer, :rows], sendable(parts[peer])), "what this call brought is still there"
        assert made.counts == [call + 1] * rows + [calls] * 2
        made.inbox.check()


@pytest.mark.parametrize("seed", [0, 3])
def test_several_blocks_of_a_row_give_the_bits_of_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, draw = InboxShape(8, 1024, 2), torch.Generator().manual_seed(seed)
    residual, *parts = (torch.randn(2, 1024, generator=draw).bfloat16() for _ in range(9))
    weight = (1 + 0.3 * torch.randn(1024, generator=draw)).bfloat16()
    found: list[Tensor] = []
    for num_blocks in (1, 2, 4):
        monkeypatch.setattr(sm90, "blocks", lambda shape, rows, num_blocks=num_blocks: num_blocks)
        made = Rank(shape, 3, 0)
        for peer, part in enumerate(parts):
            made.received(3)[0, peer] = sendable(part)
        with torch.inference_mode(), emulated(seed) as emulation:
            emulation.ranges += made.ranges
            found.append(sm90.all_reduce_add_norm_sm90(parts[3], residual, weight, EPS, made.inbox)[1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
