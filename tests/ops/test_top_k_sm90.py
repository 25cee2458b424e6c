"""Selection on Hopper. Without a GPU: the source compiles without spills, how launches are cut, what is refused, and that
the launch gets the arguments that the source declares. With one: hard rows, repetition, neighbours, graphs, torch.compile.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import top_k
from legato.ops.build import Source
from legato.ops.case import Draw
from legato.ops.select import sm90, sm90_blocks, sm90_clusters, torch_topk
from legato.ops.select.adversarial import adversarial_rows

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("form", "name"), [(sm90.SPARSE, "top_k"), (sm90.SPARSE, "planned_top_k"), (sm90.DENSE, "top_k")]
)
def test_the_source_compiles(form: sm90.Form, name: str) -> None:
    """As many blocks fit as the form says, and hardly anything is spilled for it."""
    used = sm90.kernel(form, name).usage("sm_90a")
    assert used.registers * form.threads * form.resident <= 65536
    assert used.spill_store_bytes <= 40 and used.spill_load_bytes <= 120


def test_rows_in_registers_compile_without_spills() -> None:
    used = sm90.short_kernel().usage("sm_90a")
    assert used.registers * sm90.SHORT_THREADS <= 32768 and used.spill_store_bytes == used.stack_bytes == 0


@pytest.mark.parametrize("form", [sm90_clusters.CLUSTERS, sm90_blocks.BLOCKS])
def test_the_baselines_compile_without_spills(form: sm90_clusters.Binned) -> None:
    used = form.kernel.usage("sm_90a")
    assert used.registers <= 32 and used.spill_store_bytes == used.stack_bytes == 0


@pytest.mark.parametrize("rows", [1, 2, 6, 8, 9, 31, 32, 33, 64, 66, 67, 128, 132, 133, 1000])
@pytest.mark.parametrize("width", [1, 64, 513, 4096, 81920, 131072, 131073, 1 << 20, 1 << 23])
def test_how_launches_are_cut(rows: int, width: int) -> None:
    cut = sm90.cut(rows, width, 132)
    assert cut.blocks in (1, 2, 4, 8, 16) and (cut.blocks == 1 or rows * cut.blocks <= 528)
    assert cut.form.exhaustive_bytes <= cut.shared_bytes <= 227 * 1024
    assert cut.blocks == 1 or width > cut.share * cut.blocks // 2
    assert rows * cut.blocks <= 132 or cut.shared_bytes <= 113 * 1024


def source_text(name: str = "top_k.cu") -> str:
    """A source and what it includes, end to end."""
    return "".join(path.read_text() for path in Source(Path(sm90.__file__).with_name(name)).files())


def arguments(width: int = 640, rows: int = 3) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    scores, lengths = torch.zeros(rows, width), torch.full((rows,), width, dtype=torch.int32)
    table = torch.zeros(1, -(-width // 64), dtype=torch.int32)
    return scores, lengths, 64, table, torch.zeros(rows, dtype=torch.int32)


def test_what_is_refused() -> None:
    scores, lengths, k, table, request = arguments()
    with pytest.raises(ValueError, match="9 pages is too narrow for 640"):
        sm90.top_k_sm90(scores, lengths, k, table[:, :9], request)
    with pytest.raises(ValueError, match=r"float64 \(3, 640\)"):
        sm90.top_k_sm90(scores.double(), lengths, k, table, request)
    with pytest.raises(ValueError, match="k = 0"):
        sm90.top_k_sm90(scores, lengths, 0, table, request)


def test_shapes_are_known_without_running() -> None:
    with FakeTensorMode():
        scores, rest = torch.empty(3, 640, device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
        slots, counts = sm90.top_k_sm90(scores, rest, 64, torch.empty(1, 10, dtype=torch.int32, device="cuda"), rest)
    assert slots.shape == (3, 64) and counts.shape == (3,) and slots.dtype == counts.dtype == torch.int32


def test_the_launch_gets_what_the_source_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(sm90, "kernel", lambda form: lambda how, *given: calls.append((how, given)))
    monkeypatch.setattr(sm90, "_processors", lambda device: 132)
    scores, lengths, k, table, request = arguments(width=81920, rows=6)
    slots, counts = sm90._select._init_fn(scores, lengths, k, table, request, None)
    (how, given) = calls[0]
    source = source_text()
    declared = re.search(r"top_k\((const float\*.*?)(?: PROFILE_PARAMETER)?\) \{", source, re.S)
    names = [part.split()[-1] for part in declared[1].split(",")]
    passed = dict(zip(names, given, strict=True))
    assert passed["scores"] is scores and passed["lengths"] is lengths and passed["slots"] is slots
    assert passed["page_table"] is table and passed["request"] is request and passed["counts"] is counts
    assert (passed["stride"], passed["table_stride"], passed["k"]) == (81920, 1280, 64)
    assert 1 << passed["cluster_bits"] == how.cluster[0] and how.grid == (6 * how.cluster[0],)
    assert (
        passed["memory_bytes"] == how.shared_bytes
        and passed["share"] == 512
        and passed["sampling"] == pytest.approx(0.4 / 64)
    )


@pytest.mark.parametrize("width", [640, 4096])
def test_the_launch_of_short_rows_gets_what_the_source_declares(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    calls = []
    monkeypatch.setattr(sm90, "short_kernel", lambda: lambda how, *given: calls.append((how, given)))
    scores, lengths, k, table, request = arguments(width=width, rows=6)
    slots, counts = sm90._select._init_fn(scores, lengths, k, table, request, None)
    ((how, given),) = calls
    declared = re.search(r" top_k_short\((const .*?)(?: PROFILE_PARAMETER)?\) \{", source_text("top_k_short.cu"), re.S)
    passed = dict(zip([part.split()[-1] for part in declared[1].split(",")], given, strict=True))
    assert passed["scores"] is scores and passed["lengths"] is lengths and passed["slots"] is slots
    assert passed["page_table"] is table and passed["request"] is request and passed["counts"] is counts
    assert (passed["stride"], passed["table_stride"], passed["k"], passed["width"]) == (width, width // 64, 64, width)
    assert passed["memory_bytes"] == how.shared_bytes == sm90.SHORT_BYTES and how.cluster is None
    assert how.grid == (6,) and width <= how.block[0] * sm90.SHORT_EACH


@pytest.mark.parametrize(("rows", "blocks"), [(20, 96), (24, 96)])
def test_a_plan_and_its_launch_agree(monkeypatch: pytest.MonkeyPatch, rows: int, blocks: int) -> None:
    calls: dict[str, tuple] = {}
    monkeypatch.setattr(sm90, "kernel", lambda form, name: lambda how, *given: calls.update({name: (how, given)}))
    monkeypatch.setattr(sm90, "_processors", lambda device: 132)
    scores, lengths, k, table, request = arguments(width=81920, rows=rows)
    plan = sm90.plan_top_k(lengths, request, k)
    sm90._select._init_fn(scores, lengths, k, table, request, plan)
    source = source_text()
    passed = {}
    for name in ("plan_top_k", "planned_top_k"):
        declared = re.search(rf" {name}\((const .*?)(?: PROFILE_PARAMETER)?\) \{{", source, re.S)
        names = [part.split()[-1] for part in declared[1].split(",")]
        passed[name] = dict(zip(names, calls[name][1], strict=True))
    assert passed["plan_top_k"]["plan"] is passed["planned_top_k"]["plan"] is plan
    assert passed["plan_top_k"]["blocks"] == calls["planned_top_k"][0].grid[0] == blocks
    assert passed["plan_top_k"]["k"] == passed["planned_top_k"]["k"] == k
    assert passed["planned_top_k"]["scores"] is scores and passed["planned_top_k"]["page_table"] is table
    assert 1 << passed["plan_top_k"]["cluster_bits"] == calls["planned_top_k"][0].cluster[0] == 16
    # Blocks that rows take: one each, and less than two for every five quarters of a block's portion.
    assert plan.numel() >= 4 * (1 + blocks * -(-(rows + blocks * 8 // 5) // blocks))


def test_few_rows_and_very_many_have_no_plan() -> None:
    for rows in (1, 6, 19, 25, 1025):
        assert sm90.plan_top_k(*(torch.zeros(rows, dtype=torch.int32),) * 2, 64) is None
    with pytest.raises(ValueError, match=r"lengths are torch\.int64"):
        sm90.plan_top_k(torch.zeros(20, dtype=torch.int64), torch.zeros(20, dtype=torch.int32), 64)


def test_rows_that_the_loads_cannot_start_at_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(sm90, "kernel", lambda form: lambda how, *given: calls.append(given))
    monkeypatch.setattr(sm90, "_processors", lambda device: 132)
    monkeypatch.setattr(sm90, "short_kernel", lambda: lambda how, *given: calls.append(given))
    for width in (322, 9322):
        _, lengths, k, table, request = arguments(width=width)
        for scores in (
            torch.randn(3, width),
            torch.randn(3, width + 700)[:, 1 : width + 1],
            torch.randn(width, 3).t(),
        ):
            sm90._select._init_fn(scores, lengths, k, table, request, None)
            read, stride = calls[-1][0], calls[-1][6]
            assert stride % 4 == 0 and read.data_ptr() % 16 == 0 and torch.equal(read[:, :width], scores)


def test_torch_topk_selects_what_the_reference_does() -> None:
    draw = Draw(torch.Generator().manual_seed(0), torch.device("cpu"))
    scores, table = draw.normal(6, 640), draw.distinct(20, 20).view(2, 10)
    lengths, request = draw.listed(640, 0, 1, 63, 65, 639), draw.listed(0, 1, 0, 1, 0, 1)
    for k in (1, 64, 1000):
        expected = top_k.reference(scores, lengths, k, table, request)
        found = torch_topk.top_k_torch(scores, lengths, k, table, request)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected))


def on_device(width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row of every hard kind, lengths that differ, NaN beyond them, and a table exactly as wide as the rows."""
    draw = Draw(torch.Generator().manual_seed(seed), torch.device("cuda"))
    rows = torch.stack(tuple(adversarial_rows(draw, width).values()))
    lengths = width - torch.arange(len(rows), dtype=torch.int32, device="cuda")
    rows = rows.masked_fill(torch.arange(width, device="cuda") >= lengths[:, None], torch.nan)
    pages = -(-width // 64)
    table = draw.distinct(pages, pages).view(1, pages)
    return rows, lengths, table, torch.zeros(len(rows), dtype=torch.int32, device="cuda")


@gpu
@needs_gpu
@pytest.mark.parametrize("width", [2049, 4096, 10007, 65536, 131072])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_hard_rows(width: int, rows: int) -> None:
    scores, lengths, table, request = on_device(width)
    for first in range(0, 20, rows):
        some = slice(first, first + rows)
        for k in (64, 2048):
            given = scores[some], lengths[some], k, table, request[some]
            for ours, theirs in zip(sm90.top_k_sm90(*given), top_k.reference(*given)):
                assert torch.equal(ours, theirs)


@gpu
@needs_gpu
@pytest.mark.parametrize("width", [64, 2047, 2048, 2049, 2112, 3001, 4095, 4096, 4097])
def test_hard_rows_of_narrow_tables(width: int) -> None:
    """All that is one block's, up to the width from which on it is not; and beyond the lengths what would be chosen."""
    scores, lengths, table, request = on_device(width)
    beyond = torch.arange(width, device="cuda") >= lengths[:, None]
    for k in (1, 64, 2047, 2048, 4096):
        expected = top_k.reference(scores, lengths, k, table, request)
        for filling in (torch.nan, torch.inf):
            given = scores.masked_fill(beyond, filling), lengths, k, table, request
            for ours, theirs in zip(sm90.top_k_sm90(*given), expected):
                assert torch.equal(ours, theirs), (k, filling)


@gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 6, 20, 66, 132])
def test_short_rows_of_wide_tables(rows: int) -> None:
    """As in the engine's graphs: the launch is cut for the widest row, how many blocks work is decided by the length."""
    width = 1 << 18
    draw = Draw(torch.Generator("cuda").manual_seed(rows), torch.device("cuda"))
    scores, table = draw.normal(rows, width), draw.distinct(width // 64, width // 64).view(1, -1)
    request = torch.zeros(rows, dtype=torch.int32, device="cuda")
    for longest in (1, 2048, 2049, 4095, 8192, 20000, 70000, width):
        lengths = (longest - torch.arange(rows, dtype=torch.int32, device="cuda") % 7).clamp_min(0)
        lengths[rows // 2] = max(longest // 2, 0)
        given = scores, lengths, 2048, table, request
        for ours, theirs in zip(sm90.top_k_sm90(*given), top_k.reference(*given)):
            assert torch.equal(ours, theirs), longest


@gpu
@needs_gpu
def test_all_equal_rows_as_long_as_a_count_of_sixteen_bits_is_wide() -> None:
    """The blocks' counts of a bin travel in half words."""
    for width in (65535, 65536, 65600, 131072):
        scores = torch.ones(2, -(-width // 64) * 64, device="cuda")
        scores[1, 1::2] = 2.0
        table = torch.arange(-(-width // 64), dtype=torch.int32, device="cuda").view(1, -1)
        lengths, request = (torch.full((2,), value, dtype=torch.int32, device="cuda") for value in (width, 0))
        given = scores, lengths, 2048, table, request
        assert torch.equal(sm90.top_k_sm90(*given)[0], top_k.reference(*given)[0]), width


@gpu
@needs_gpu
@pytest.mark.parametrize("width", [4096, 6016, 81920])
def test_crowds_at_the_boundary(width: int) -> None:
    """Equal scores around the k-th, from a few to more than one bin may hold."""
    draw = Draw(torch.Generator("cuda").manual_seed(width), torch.device("cuda"))
    crowds = (1, 40, 100, 130, 300, 511, 512, 513, 600, 2100)
    scores = draw.normal(len(crowds), width)
    order = scores.argsort(1, descending=True)
    for row, crowd in enumerate(crowds):
        first = max(2048 - crowd // 2, 0)
        scores[row, order[row, first : first + crowd]] = scores[row, order[row, 2048]].clone()
    table = draw.distinct(width // 64, width // 64).view(1, -1)
    lengths, request = (torch.full((len(crowds),), value, dtype=torch.int32, device="cuda") for value in (width, 0))
    given = scores, lengths, 2048, table, request
    found, expected = sm90.top_k_sm90(*given), top_k.reference(*given)
    wrong = [crowd for crowd, same in zip(crowds, (found[0] == expected[0]).all(1).tolist()) if not same]
    assert not wrong


@gpu
@needs_gpu
@pytest.mark.parametrize("form", [sm90_clusters.CLUSTERS, sm90_blocks.BLOCKS])
def test_the_baselines_choose_what_the_reference_does(form: sm90_clusters.Binned) -> None:
    draw = Draw(torch.Generator("cuda").manual_seed(0), torch.device("cuda"))
    for width in (64, 2048, 2304, 8192, 81920):
        scores, table = draw.normal(6, width), draw.distinct(width // 64, width // 64).view(1, -1)
        lengths, request = (torch.full((6,), value, dtype=torch.int32, device="cuda") for value in (width, 0))
        given = scores, lengths, 2048, table, request
        found, expected = form.run(*given), top_k.reference(*given)
        assert torch.equal(found[0].sort(1).values, expected[0].sort(1).values) and torch.equal(found[1], expected[1])


@gpu
@needs_gpu
@pytest.mark.parametrize("width", [4096, 81920])
def test_a_hundred_runs_give_the_same_bits(width: int) -> None:
    scores, lengths, table, request = on_device(width)
    first = sm90.top_k_sm90(scores, lengths, 2048, table, request)
    for _ in range(100):
        again = sm90.top_k_sm90(scores, lengths, 2048, table, request)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@gpu
@needs_gpu
@pytest.mark.parametrize("width", [4096, 20000])
def test_one_graph_serves_every_length(width: int) -> None:
    scores, _, table, request = on_device(width)
    lengths = torch.full((len(scores),), width, dtype=torch.int32, device="cuda")
    sm90.top_k_sm90(scores, lengths, 2048, table, request)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots, counts = sm90.top_k_sm90(scores, lengths, 2048, table, request)
    for length in (0, 1, 64, 2047, 2048, 2049, 4095, 8192, 8193, 19999, 20000):
        lengths.fill_(min(length, width))
        graph.replay()
        expected = top_k.reference(scores, lengths, 2048, table, request)
        assert torch.equal(slots, expected[0]) and torch.equal(counts, expected[1]), length


def chosen_alone(scores: Tensor, lengths: Tensor, table: Tensor, request: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Every row by the reference, over no more than its own scores."""
    found = []
    for row, length in enumerate(lengths.tolist()):
        width = max(-(-length // 64), 1) * 64
        given = scores[row : row + 1, :width].contiguous(), lengths[row : row + 1], 2048, table[:, : width // 64]
        found.append(top_k.reference(*given, request[row : row + 1]))
    return found


@gpu
@needs_gpu
@pytest.mark.parametrize("rows", [20, 22, 24])
def test_rows_of_any_lengths_by_a_plan(rows: int) -> None:
    """Long, short and empty rows in one launch, in any order; blocks that take several rows one after the other."""
    width, draw = 1 << 20, Draw(torch.Generator("cuda").manual_seed(rows), torch.device("cuda"))
    lengths = draw.integers(rows, low=0, high=12000)
    lengths[: min(rows, 12)] = draw.listed(0, 1, 63, 2047, 2048, 2049, 81920, width, 300001, 64, 5000, 70000)[:rows]
    lengths = lengths[draw.distinct(rows, rows).long()].contiguous()
    scores = torch.as_strided(draw.normal(width + rows * 64), (rows, width), (64, 1))
    table, request = draw.distinct(3 * width // 64, 3 * width // 64).view(3, -1), draw.integers(rows, low=0, high=3)
    plan = sm90.plan_top_k(lengths, request, 2048)
    assert plan is not None
    slots, counts = sm90.top_k_sm90(scores, lengths, 2048, table, request, plan)
    for row, (expected, count) in enumerate(chosen_alone(scores, lengths, table, request)):
        assert torch.equal(slots[row], expected[0]) and counts[row] == count[0], (row, int(lengths[row]))


@gpu
@needs_gpu
@pytest.mark.parametrize("width", [2049, 10007, 131072])
def test_hard_rows_by_a_plan(width: int) -> None:
    scores, lengths, table, request = on_device(width)
    plan = sm90.plan_top_k(lengths, request, 2048)
    found = sm90.top_k_sm90(scores, lengths, 2048, table, request, plan)
    for ours, theirs in zip(found, top_k.reference(scores, lengths, 2048, table, request)):
        assert torch.equal(ours, theirs)


@gpu
@needs_gpu
def test_one_graph_of_plan_and_selection_serves_every_length() -> None:
    scores, _, table, request = on_device(20000)
    lengths = torch.full((len(scores),), 20000, dtype=torch.int32, device="cuda")
    sm90.top_k_sm90(scores, lengths, 2048, table, request, sm90.plan_top_k(lengths, request, 2048))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = sm90.plan_top_k(lengths, request, 2048)
        made = [sm90.top_k_sm90(scores, lengths, 2048, table, request, plan) for _ in range(3)]
    for length in (0, 1, 2048, 2049, 8192, 20000):
        lengths.copy_((length - 300 * torch.arange(len(scores), device="cuda") % 7).clamp_min(0))
        graph.replay()
        expected = top_k.reference(scores, lengths, 2048, table, request)
        assert all(torch.equal(slots, expected[0]) and torch.equal(counts, expected[1]) for slots, counts in made)


@gpu
@needs_gpu
def test_under_torch_compile() -> None:
    scores, lengths, table, request = on_device(5000)
    compiled = torch.compile(lambda x: sm90.top_k_sm90(x * 2, lengths, 2048, table, request), fullgraph=True)
    expected = top_k.reference(scores * 2, lengths, 2048, table, request)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(compiled(scores), expected))
