"""The Hopper add-and-norm: compilation, the layout of inboxes, and on a GPU as many ranks as inboxes, each a stream.

Ranks that are processes are tested in tests/parallel/test_ipc.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("tests.ops.nvrtc")

from legato.ops.reduce import Recorded, add_rms_norm, all_gather, all_reduce_add_norm, inbox, sm90
from legato.ops.reduce.inbox import ALARM_WORDS, EMPTY_BYTE, Inbox, InboxShape, RankLostError, two_shots_pay_from

EPS = 1e-5


@pytest.mark.parametrize(
    ("ranks", "width", "more"),
    [
        (8, 6144, {"num_blocks": 8}),
        (8, 6144, {"two_shot": True}),
        *(
            pytest.param(*made, marks=pytest.mark.full)
            for made in (
                *(
                    (1, 6144, {}),
                    (2, 256, {}),
                    (8, 6144, {}),
                    (8, 6144, {"local": True}),
                    (2, 6144, {"two_shot": True}),
                ),
                *((ranks, 6144, {"num_blocks": 8}) for ranks in range(2, 8)),
            )
        ),
    ],
)
def test_the_sum_compiles_without_spills_and_its_blocks_run_at_once(
    ranks: int, width: int, more: dict[str, bool]
) -> None:
    kernel = sm90.add_norm_kernel(ranks, width, **more)
    usage, macros = kernel.usage("sm_90a"), kernel.source.defines
    assert usage.spill_store_bytes == usage.spill_load_bytes == usage.stack_bytes == 0
    registers = -(-usage.registers // 8) * 8 * macros["THREADS"]
    assert 65536 // registers * 132 >= macros["BLOCKS"] * inbox.MOST_ROWS, "as many as the tallest sum has"


def test_blocks_share_a_row_where_it_pays_and_the_bits_stay() -> None:
    assert [sm90.blocks(InboxShape(ranks, 6144), 6) for ranks in (2, 4, 5, 8)] == [8, 8, 8, 8]
    assert [sm90.blocks(InboxShape(ranks, 6144), 9) for ranks in (2, 4, 5, 8)] == [1, 1, 8, 8]
    assert [sm90.blocks(InboxShape(8, 6144), rows) for rows in (32, 33)] == [8, 1]
    assert [sm90.blocks(InboxShape(8, width), 6) for width in (256, 512, 768, 1024, 2048)] == [1, 2, 1, 4, 8]
    assert sm90.blocks(InboxShape(8, 12288), 6) == 1, "two pieces a thread: another order"
    assert [sm90.blocks(InboxShape(8, 6144, two_shot_rows=6), rows) for rows in (5, 6)] == [8, 1]
    for width in (512, 1024, 6144):
        macros = sm90.sum_kernel(InboxShape(8, width), 6).source.defines
        assert macros["THREADS"] * macros["BLOCKS"] * macros["VECTORS"] * 8 == width and macros["VECTORS"] == 1


def test_the_gather_compiles_without_spills() -> None:
    for kernel in (sm90.all_gather_kernel(8), sm90.gather_local_kernel(8)):
        usage = kernel.usage("sm_90a")
        assert usage.spill_store_bytes == usage.spill_load_bytes == usage.stack_bytes == 0


def test_threads_hold_a_row_exactly() -> None:
    for width in range(8, 8 * 4096, 8):
        block = sm90.threads(width)
        if block is not None:
            assert block % 32 == 0 and width % (8 * block) == 0 and width // (8 * block) in (1, 2, 4)
    assert [sm90.threads(width) for width in (256, 6144, 12288, 24576)] == [32, 768, 768, 768]
    assert [sm90.threads(width) for width in (100, 248, 24576 * 2)] == [None] * 3


def test_a_header_says_where_everything_is() -> None:
    shape = InboxShape(num_ranks=3, width=256, rows=16)
    assert shape.words_at == inbox.HEADER_BYTES + 3 * 3 * 16 * 512
    assert shape.num_bytes == shape.words_at + 2 * 3 * inbox.MOST_WORDS * 8
    made = shape.header([1 << 40, 2 << 40, 3 << 40], alarm=7, patience_ns=10**9)
    assert len(made) == inbox.HEADER_BYTES
    words = (ctypes.c_uint64 * 11).from_buffer_copy(made)
    assert words[inbox.PATIENCE_AT // 8] == 10**9
    assert list(words) == [1 << 40, 2 << 40, 3 << 40, 0, 0, 0, 0, 0, 7, 10**9, shape.words_at]
    assert (ctypes.c_uint32 * 2).from_buffer_copy(made, 88)[0] == 16
    assert not any(made[92:]), "no rank is missing and no call was made"
    with pytest.raises(ValueError, match="addresses"):
        shape.header([1, 2], alarm=7, patience_ns=1)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("num_ranks", (1, 256, 6)),
        ("num_ranks", (9, 256, 6)),
        ("rows", (2, 256, 129)),
        ("width", (2, 252, 6)),
        ("two_shot_rows", (2, 256, 6, 0)),
    ],
)
def test_inboxes_that_no_kernel_takes_are_refused(field: str, given: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=field):
        InboxShape(*given)


def test_tall_sums_go_in_two_shots_where_that_is_wanted() -> None:
    shape = InboxShape(8, 6144, two_shot_rows=16)
    assert [shape.is_two_shot(rows) for rows in (1, 15, 16, 128)] == [False, False, True, True]
    assert not InboxShape(8, 6144).is_two_shot(128)


def test_two_shots_pay_where_links_carry_enough_less() -> None:
    """Between two ranks both send as much; among more, the more there are and the wider rows, the sooner."""
    assert [two_shots_pay_from(ranks, 6144) for ranks in range(2, 9)] == [None, None, 93, 58, 42, 33, 27]
    assert two_shots_pay_from(8, 64) is None and two_shots_pay_from(8, 12288) == 14


@pytest.mark.parametrize(
    ("alarm", "words"),
    [
        ([0b10, 1, 41, 3], "rank 1 did not take part in time in collective 41, as rank 0 saw"),
        ([0b110, 1, 41, 3], "ranks 1, 2 did not"),
        ([0b10, 0, 0, 0], "rank 1 did not take part in time in a collective, as a peer of rank 0 saw"),
    ],
)
def test_an_alarm_names_the_missing_rank(alarm: list[int], words: str) -> None:
    quiet = Inbox(0, InboxShape(3, 256), 0, torch.zeros(ALARM_WORDS, dtype=torch.int32), Recorded((), ()))
    quiet.check()
    quiet.alarm.copy_(torch.tensor(alarm))
    with pytest.raises(RankLostError, match=words):
        quiet.check()


def _inboxes(shape: InboxShape, patience_seconds: float) -> list[tuple[Inbox, Tensor]]:
    """Inboxes of all ranks in this process, with the memory that they live in."""
    memory = [
        torch.full((shape.num_bytes,), EMPTY_BYTE, dtype=torch.uint8, device="cuda") for _ in range(shape.num_ranks)
    ]
    made: list[tuple[Inbox, Tensor]] = []
    for rank, block in enumerate(memory):
        alarm = torch.zeros(ALARM_WORDS, dtype=torch.int32, pin_memory=True)
        header = shape.header([m.data_ptr() for m in memory], alarm.data_ptr(), round(patience_seconds * 1e9))
        block[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        made.append((Inbox(rank, shape, block.data_ptr(), alarm, Recorded((), ())), block))
    torch.cuda.synchronize()
    return made


@pytest.fixture(autouse=True)
def synchronised() -> Iterator[None]:
    """A kernel that still runs must not meet memory that the next test was given."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _draw(rows: int, width: int, ranks: int, seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(rows, width, generator=draw).bfloat16().cuda() for _ in range(ranks + 1)]
    weight = (1 + 0.3 * torch.randn(width, generator=draw)).bfloat16().cuda()
    return 3 * tensors[0], tensors[1:], weight


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def marked(function):
    for mark in gpu:
        function = mark(function)
    return function


@marked
@pytest.mark.parametrize("two_shot_rows", [None, 6])
@pytest.mark.parametrize(
    ("ranks", "width"), [(2, 6144), (3, 256), (4, 6144), (5, 6144), (6, 256), (7, 6144), (8, 6144), (8, 256), (8, 512)]
)
def test_ranks_get_the_reference_s_bits_call_after_call(ranks: int, width: int, two_shot_rows: int | None) -> None:
    """Calls of changing heights, in one shot or two: later rows' buffers rest while others turn."""
    boxes = _inboxes(InboxShape(ranks, width, 64, two_shot_rows), patience_seconds=5)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    tallest = 128 // ranks  # all blocks of all ranks must run at once, on one GPU here
    for call, rows in enumerate((6, 1, 6, tallest, 3, 6, 6, 15, 1, 6)):
        residual, partials, weight = _draw(rows, width, ranks, seed=call)
        partials[0][0, :2] = float("nan")  # a pair of NaNs must not look like a word that has not arrived
        partials[-1].view(torch.int32)[-1, 1] = -1
        torch.cuda.synchronize()
        made = []
        for (box, _), partial, stream in zip(boxes, partials, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(sm90.all_reduce_add_norm_sm90(partial, residual, weight, EPS, box))
        torch.cuda.synchronize()
        expected = all_reduce_add_norm.reference(partials[0], residual, weight, EPS, Recorded((), tuple(partials[1:])))
        for (box, _), (h, normed) in zip(boxes, made, strict=True):
            box.check()
            assert torch.equal(h.nan_to_num(nan=7.0), expected[0].nan_to_num(nan=7.0)), f"call {call}"
            torch.testing.assert_close(normed, expected[1], rtol=2**-7, atol=2**-8, equal_nan=True)
            assert torch.equal(normed.nan_to_num(nan=7.0), made[0][1].nan_to_num(nan=7.0)), (
                "the same bits on every rank"
            )


@marked
@pytest.mark.parametrize(
    ("ranks", "counts"),
    [
        (8, (1, 12, 513, 3, 40_001, 1025, 12, 33_000, 12)),
        (2, (7, inbox.MOST_WORDS + 1001, 12, 3 * inbox.MOST_WORDS + 1, 40_001, 4 * inbox.MOST_WORDS)),
    ],
    ids=["at once", "in pieces"],
)
def test_gathers_carry_any_bits(ranks: int, counts: tuple[int, ...]) -> None:
    """Pieces of two ranks only: blocks of eight, and those that wait behind them, are more than one GPU has place for."""
    boxes = _inboxes(InboxShape(ranks, 256, 16), patience_seconds=5)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for call, count in enumerate(counts):
        shards = [torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device="cuda") for _ in range(ranks)]
        shards[call % ranks].fill_(-1)
        shards[(call + 1) % ranks].fill_(0)
        torch.cuda.synchronize()
        made = []
        for (box, _), shard, stream in zip(boxes, shards, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(sm90.all_gather_sm90(shard, box))
        torch.cuda.synchronize()
        for (box, _), gathered in zip(boxes, made, strict=True):
            box.check()
            assert torch.equal(gathered, torch.stack(shards)), f"call {call}"


@marked
@pytest.mark.parametrize(("width", "two_shot_rows"), [(256, None), (256, 1), (6144, None)])
def test_a_rank_that_does_not_come_is_named_and_nothing_waits_again(width: int, two_shot_rows: int | None) -> None:
    shape = InboxShape(3, width, 16, two_shot_rows)
    boxes = _inboxes(shape, patience_seconds=0.05)
    residual, partials, weight = _draw(6, width, 3, seed=1)
    for kernel in (sm90.sum_kernel(shape, 6), sm90.all_gather_kernel(3)):
        kernel.load()  # compiled before anything is timed
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for rank in (0, 2):
        with torch.cuda.stream(streams[rank]):
            h, normed = sm90.all_reduce_add_norm_sm90(partials[rank], residual, weight, EPS, boxes[rank][0])
    torch.cuda.synchronize()
    assert h.isnan().all() and normed.isnan().all()
    for rank in (0, 2):
        with pytest.raises(RankLostError, match="rank 1 did not"):
            boxes[rank][0].check()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    h, _ = sm90.all_reduce_add_norm_sm90(partials[0], residual, weight, EPS, boxes[0][0])
    gathered = sm90.all_gather_sm90(partials[0], boxes[0][0])
    end.record()
    # The late one learns it too.
    late, _ = sm90.all_reduce_add_norm_sm90(partials[1], residual, weight, EPS, boxes[1][0])
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 40 and h.isnan().all() and late.isnan().all()
    assert (gathered[1:].view(torch.int32) == -1).all()
    with pytest.raises(RankLostError, match="rank 1 did not"):
        boxes[1][0].check()


@marked
def test_in_a_graph_and_for_rows_that_are_not_aligned() -> None:
    residual, (partial,), weight = _draw(6, 6144, 1, seed=2)
    expected = add_rms_norm.reference(residual, partial, weight, EPS)
    shifted = torch.empty(6 * 6144 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(6, 6144).copy_(partial)
    for delta in (partial, shifted, torch.cat([partial, partial], 1)[:, :6144]):
        h, normed = sm90.add_rms_norm_sm90(residual, delta, weight, EPS)
        assert torch.equal(h, expected[0])
        torch.testing.assert_close(normed, expected[1], rtol=2**-7, atol=2**-8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, normed = residual, partial
        for _ in range(3):
            h, normed = sm90.add_rms_norm_sm90(h, normed, weight, EPS)
    graph.replay()
    for _ in range(2):
        expected = add_rms_norm.reference(*expected, weight, EPS)
    torch.testing.assert_close(h, expected[0], rtol=2**-6, atol=2**-6)
    assert torch.equal(sm90.norm(residual, weight, EPS), sm90.add_rms_norm_sm90(residual, 0 * partial, weight, EPS)[1])


@marked
def test_rows_do_not_depend_on_their_neighbours() -> None:
    residual, (partial,), weight = _draw(64, 6144, 1, seed=3)
    _, all_rows = sm90.add_rms_norm_sm90(residual, partial, weight, EPS)
    for rows in (1, 6, 16):
        _, some = sm90.add_rms_norm_sm90(residual[:rows].clone(), partial[:rows].clone(), weight, EPS)
        assert torch.equal(some, all_rows[:rows])


def test_what_no_kernel_takes_goes_to_the_reference() -> None:
    """On any machine: float32, widths of no whole warps, no rows."""
    for dtype, rows, width in ((torch.float32, 6, 256), (torch.bfloat16, 6, 100), (torch.bfloat16, 0, 256)):
        x, delta, weight = (
            torch.randn(rows, width).to(dtype),
            torch.randn(rows, width).to(dtype),
            torch.ones(width).to(dtype),
        )
        for found, expected in zip(
            sm90.add_rms_norm_sm90(x, delta, weight, EPS), add_rms_norm.reference(x, delta, weight, EPS), strict=True
        ):
            assert torch.equal(found, expected)
        exchange = Recorded((delta,), ())
        found = sm90.all_reduce_add_norm_sm90(delta, x, weight, EPS, exchange)
        assert torch.equal(found[0], all_reduce_add_norm.reference(delta, x, weight, EPS, exchange)[0])
    shard = torch.arange(5)
    assert torch.equal(
        sm90.all_gather_sm90(shard, Recorded((), (shard,))), all_gather.reference(shard, Recorded((), (shard,)))
    )
