"""The index scores of the Hopper kernel: parity in float64, bits that depend on nothing else, garbage that nobody reads,
one graph for every length; and, without a GPU, the rules of the file and that its source compiles."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import build
from legato.ops.cache.layout import INDEX_KEY_BYTES, INDEX_PAGE_BYTES, quantize_groups
from legato.ops.case import Draw
from legato.ops.op import Op
from legato.ops.score import CASES, index_scores, sm90
from tests.ops.oracles import ORACLES

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass
class Batch:
    """Requests of `rows` rows each; the last row of a request sees `ends` keys. Pages are in random order, one page of
    the cache and all entries behind a request's pages are nobody's."""

    q: Tensor
    gates: Tensor
    cache: Tensor
    table: Tensor
    request: Tensor
    lengths: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.gates, self.cache, self.table, self.request, self.lengths

    def scores(self, plan: Tensor | None = None) -> Tensor:
        return sm90.index_scores_sm90(*self.arguments(), plan)

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """Scores of one row in float64, and the same sum with every gate's magnitude: the measure of an error."""
        length = int(self.lengths[row])
        pages = self.cache[self.table[int(self.request[row]), : -(-length // 64)].long()]
        keys = pages[:, :INDEX_KEY_BYTES].contiguous().view(torch.float8_e4m3fn).view(-1, 128).double()
        scales = pages[:, INDEX_KEY_BYTES:].contiguous().view(torch.float32).view(-1, 1).double()
        dots = ((keys * scales) @ self.q[row].double().T).relu_()[:length]
        return dots @ self.gates[row].double(), dots @ self.gates[row].double().abs()


def batch(ends: tuple[int, ...], rows: int, seed: int = 0, spare: int = 2) -> Batch:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    pages = [-(-end // 64) for end in ends]
    total = sum(pages) + 1
    codes, scales = quantize_groups(normal(total * 64, 128) * torch.exp(0.5 * normal(total * 64, 1)))
    cache = torch.empty(total, INDEX_PAGE_BYTES, dtype=torch.uint8, device="cuda")
    cache[:, :INDEX_KEY_BYTES] = codes.view(torch.uint8).view(total, -1)
    cache[:, INDEX_KEY_BYTES:] = scales.view(total, 64).view(torch.uint8)
    order = (torch.randperm(total - 1, device="cuda", generator=generator) + 1).int()
    table = torch.full((len(ends), max(pages) + spare), -1, dtype=torch.int32, device="cuda")
    for owner, (first, count) in enumerate(zip([sum(pages[:i]) for i in range(len(pages))], pages)):
        table[owner, :count] = order[first : first + count]
    q, scale = quantize_groups(normal(len(ends) * rows, 32, 128))
    gates = normal(len(ends) * rows, 32) / 64 * scale.squeeze(-1)
    request = torch.arange(len(ends), device="cuda", dtype=torch.int32).repeat_interleave(rows)
    lengths = [max(0, end - rows + 1 + row) for end in ends for row in range(rows)]
    return Batch(q, gates, cache, table, request, torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def assert_right(made: Batch, scores: Tensor) -> None:
    for row in range(made.q.shape[0]):
        length = int(made.lengths[row])
        exact, size = made.row(row)
        error = (scores[row, :length].double() - exact).abs()
        assert not error.isnan().any(), f"row {row}"
        assert bool((error <= 1.5e-3 * size + 1e-6).all()), f"row {row}: {float((error / (size + 1e-9)).max()):.2e}"
        if length > 2048:
            # Of the best 2048, those that are not within the error of the last one must all be there.
            best = torch.topk(exact, 2048)
            clear = best.indices[best.values > best.values[-1] + 2 * error.max()]
            found = torch.topk(scores[row, :length], 2048).indices
            assert bool(torch.isin(clear, found).all()), f"row {row}"
            assert float(torch.isin(best.indices, found).double().mean()) > 0.995, f"row {row}"


CONTEXTS = (1, 63, 64, 65, 127, 129, 2047, 2048, 2049, 2050, 4095, 4096, 4097, 16384, 65536, 81920, 131072, 262144)


@pytest.mark.gpu
@on_gpu
def test_contexts_of_six_rows() -> None:
    for context in CONTEXTS:
        made = batch((context,), 6)
        assert_right(made, made.scores())


@pytest.mark.gpu
@on_gpu
def test_a_million_keys() -> None:
    made = batch((1 << 20,), 6)
    assert_right(made, made.scores())


@pytest.mark.gpu
@on_gpu
def test_maps_of_a_cache_do_not_keep_its_memory() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = torch.zeros(1000, INDEX_PAGE_BYTES, dtype=torch.uint8, device="cuda")
    sm90._MAPS.of(cache)
    assert torch.cuda.memory_allocated() > before
    del cache
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@on_gpu
def test_ragged_batches() -> None:
    for rows in range(1, 9):
        made = batch((0, 1, 64, 3000, 20000, 129, 2), rows, seed=rows)
        assert_right(made, made.scores())
    for ends, rows in (
        ((5000,) * 6, 1),
        ((4096,) * 64, 6),
        ((300, 7000), 21),
        ((64,) * 200, 2),
        ((0, 1, 1 << 20, 63), 6),
    ):
        made = batch(ends, rows)
        assert_right(made, made.scores())


@pytest.mark.gpu
@on_gpu
def test_a_rows_bits_do_not_depend_on_its_window() -> None:
    """The same rows in windows of 1 to 8, at every place in them, and with other requests around them."""
    whole = batch((9000,), 8)
    expected = whole.scores()
    for height in range(1, 8):
        for first in range(9 - height):
            rows = slice(first, first + height)
            part = Batch(
                whole.q[rows], whole.gates[rows], whole.cache, whole.table, whole.request[rows], whole.lengths[rows]
            )
            found = part.scores()
            for row in range(height):
                length = int(part.lengths[row])
                assert torch.equal(found[row, :length], expected[first + row, :length]), (height, first, row)
    # The rows of two requests in turn: every row is a window of its own.
    mixed = Batch(
        whole.q,
        whole.gates,
        whole.cache,
        whole.table.repeat(2, 1),
        torch.arange(8, device="cuda").int() % 2,
        whole.lengths,
    )
    assert torch.equal(mixed.scores()[:, :8900], expected[:, :8900])


@pytest.mark.gpu
@on_gpu
def test_a_hundred_runs_give_the_same_bits() -> None:
    made = batch((0, 100, 70000, 3000), 6)
    plan = sm90.plan_scores(made.table, made.request, made.lengths)
    visible = torch.arange(made.table.shape[1] * 64, device="cuda") < made.lengths.unsqueeze(1)
    expected = made.scores(plan).masked_fill(~visible, 0)
    for _ in range(100):
        assert torch.equal(made.scores(plan).masked_fill(~visible, 0), expected)
        ahead = sm90.plan_scores(made.table, made.request, made.lengths, settled=True)  # while the scores still run
        assert torch.equal(made.scores(ahead).masked_fill(~visible, 0), expected)


@pytest.mark.gpu
@on_gpu
def test_garbage_that_no_row_sees_changes_no_bit() -> None:
    """NaN in keys and scales behind a request's length, in pages of nobody and in the rows of a request without keys."""
    made = batch((700, 0, 5001, 64), 6)
    visible = torch.arange(made.table.shape[1] * 64, device="cuda") < made.lengths.unsqueeze(1)
    expected = made.scores().masked_fill(~visible, 0)
    seen = torch.zeros(made.cache.shape[0] * 64, dtype=torch.bool, device="cuda")
    for owner, end in enumerate((700, 0, 5001, 64)):
        positions = torch.arange(end, device="cuda")
        seen[made.table[owner, positions // 64].long() * 64 + positions % 64] = True
    keys = made.cache[:, :INDEX_KEY_BYTES].unflatten(1, (64, 128))
    keys[~seen.view(-1, 64)] = 0xFF
    made.cache.view(torch.float32)[:, INDEX_KEY_BYTES // 4 :][~seen.view(-1, 64)] = float("nan")
    nobody = made.lengths == 0
    made.q.view(torch.uint8)[nobody] = 0xFF
    made.gates[nobody] = float("nan")
    assert torch.equal(made.scores().masked_fill(~visible, 0), expected)
    tail = made.scores()[5, 700:704]
    assert bool((tail == -torch.inf).all())


@pytest.mark.gpu
@on_gpu
def test_one_graph_serves_every_length() -> None:
    made = batch((30000, 30000), 6)
    lengths = made.lengths.clone()
    made.scores()
    made.cache = made.cache.clone()  # one that no call has seen before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = made.scores()
    for ends in ((30000, 30000), (1, 0), (64, 29999), (2049, 65), (0, 0)):
        for owner, end in enumerate(ends):
            made.lengths[6 * owner : 6 * owner + 6] = (torch.arange(end - 5, end + 1, device="cuda").clamp_min(0)).int()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(made, scores)
    assert lengths.shape == made.lengths.shape


@pytest.mark.gpu
@on_gpu
def test_other_shapes_run_the_reference() -> None:
    draw = Draw(torch.Generator().manual_seed(0), torch.device("cuda"))
    cache, table = draw.normal(3, 64, 16), draw.listed(2, 0).view(1, 2)
    arguments = draw.normal(2, 4, 16), draw.normal(2, 4), cache, table, draw.listed(0, 0), draw.listed(70, 71)
    assert torch.equal(sm90.index_scores_sm90(*arguments), index_scores.reference(*arguments))


@pytest.mark.gpu
@on_gpu
def test_bad_arguments_are_named() -> None:
    made = batch((100,), 2)
    made.lengths = made.lengths.long()
    with pytest.raises(ValueError, match=r"lengths is torch\.int64"):
        made.scores()
    made.lengths, made.gates = made.lengths.int(), made.gates.T.contiguous().T
    with pytest.raises(ValueError, match=r"gates is .* with gaps"):
        made.scores()


@pytest.mark.parametrize("kernel", [sm90.SCORES, sm90.PLAN], ids=lambda kernel: kernel.name)
def test_the_source_compiles_without_spills(kernel: build.Kernel) -> None:
    used = kernel.usage("sm_90a")
    assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0
    assert used.static_shared_bytes + kernel.shared_bytes <= 227 * 1024


def _parameters(kernel: build.Kernel) -> list[str]:
    """ "pointer", "map" or "int" for every parameter of a kernel, as its source declares them."""
    found = re.search(
        rf"\b{kernel.name}\(([^)]*)\)\s*{{\s*(extern )?__shared__|\b{kernel.name}\(([^)]*)\) {{",
        kernel.source.path.read_text(),
    )
    assert found is not None
    declared = (found[1] or found[3]).split(",")
    return ["pointer" if "*" in each else "map" if "CUtensorMap" in each else "int" for each in declared]


@pytest.mark.parametrize("rows", [0, 3])
def test_launches_pass_what_the_kernels_declare(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, tuple] = {}
    for kernel in (sm90.SCORES, sm90.PLAN):
        monkeypatch.setattr(
            sm90, "SCORES" if kernel is sm90.SCORES else "PLAN",
            lambda how, *arguments, name=kernel.name: launched.update({name: (how, arguments)}),
        )  # fmt: skip
    kernels = {
        kernel.name: kernel
        for kernel in (build.Kernel(sm90._SOURCE, "index_scores"), build.Kernel(sm90._SOURCE, "plan_scores"))
    }
    monkeypatch.setattr(sm90, "_launch", lambda device: build.Launch(grid=(132,), block=(384,)))
    monkeypatch.setattr(sm90, "tensor_map", lambda tensor, box, swizzle=0: (tensor.shape, box))
    q, cache = torch.zeros(rows, 32, 128).to(torch.float8_e4m3fn), torch.zeros(4, INDEX_PAGE_BYTES, dtype=torch.uint8)
    table, request = torch.zeros(1, 5, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    scores = sm90._score._init_fn(q, torch.zeros(rows, 32), cache, table, request, request, None)
    assert scores.shape == (rows, 5 * 64) and scores.dtype == torch.float32
    assert set(launched) == (set(kernels) if rows else set())
    for name, (_, arguments) in launched.items():
        kinds = [
            "pointer" if isinstance(argument, Tensor) else "map" if isinstance(argument, tuple) else "int"
            for argument in arguments
        ]
        assert kinds == _parameters(kernels[name])
    if rows:
        plan = launched["plan_scores"][1][-1]
        assert (
            plan is launched["index_scores"][1][-2]
            and plan.numel() == 132 * sm90.RECORD_WORDS + rows * sm90.WINDOW_WORDS
        )


def test_shapes_are_known_without_running() -> None:
    with FakeTensorMode():
        q = torch.empty(3, 32, 128, dtype=torch.float8_e4m3fn, device="cuda")
        cache = torch.empty(4, INDEX_PAGE_BYTES, dtype=torch.uint8, device="cuda")
        table, rest = (torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((1, 5), (3,)))
        scores = sm90.index_scores_sm90(q, torch.empty(3, 32, device="cuda"), cache, table, rest, rest)
    assert scores.shape == (3, 320) and scores.dtype == torch.float32


@pytest.mark.gpu
@on_gpu
def test_under_torch_compile() -> None:
    """In one piece, the plan made before or inside."""
    made = batch((700, 3000), 6)
    plan = sm90.plan_scores(made.table, made.request, made.lengths)
    visible = torch.arange(made.table.shape[1] * 64, device="cuda") < made.lengths.unsqueeze(1)
    expected = made.scores(plan).masked_fill(~visible, 0)
    rest = made.arguments()[2:]

    def doubled(gates: Tensor, plan: Tensor | None) -> Tensor:
        return sm90.index_scores_sm90(made.q, gates * 2, *rest, plan).masked_fill(~visible, 0) / 2

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(made.gates, plan), expected) and torch.equal(compiled(made.gates, None), expected)


def test_what_the_kernel_serves() -> None:
    q, cache = torch.zeros(2, 32, 128).to(torch.float8_e4m3fn), torch.zeros(1, INDEX_PAGE_BYTES, dtype=torch.uint8)
    assert sm90.serves(q, cache)
    assert not sm90.serves(q.float(), cache) and not sm90.serves(q, torch.zeros(1, 64, 128))
    assert not sm90.serves(q[:, :16], cache) and not sm90.serves(q[..., :64], cache)


def test_attached() -> None:
    assert isinstance(index_scores, Op) and index_scores.implementations["sm90"].plan is sm90.plan_scores


def test_the_reference_is_tight_on_the_byte_cache_too() -> None:
    """The cases allow what tensor cores do; the reference does better."""
    for case in CASES:
        if case.on == "any":
            (found,), expected = (
                case.outputs(index_scores.reference, case.inputs()),
                ORACLES["index_scores"](*case.inputs()),
            )
            visible = expected > -torch.inf
            assert torch.allclose(found[visible].double(), expected[visible], rtol=1e-5, atol=2e-5), case.name
