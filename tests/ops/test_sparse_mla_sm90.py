"""Sparse latent attention on Hopper. Without a GPU: forms compile without spills, how rows are cut, what is handed on, and that
the launch gets the arguments that the source declares. With one: error against float64, poison, counts, neighbours, graphs.
"""

import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import sparse_mla
from legato.ops.attend import mark_selected, sm90, sm90_forms, sm90_masked
from legato.ops.attend.masked import _request, place_lengths
from legato.ops.attend.sm90_forms import FORMS, INVARIANT_ROWS, Form, Way, cut
from legato.ops.cache import latent_cache, read_latent_rows
from legato.ops.case import Draw
from legato.ops.gemm import sm90 as products
from legato.ops.pointwise import rope_angles
from legato.ops.prologue import LatentNorm, Places
from legato.ops.prologue import sm90 as prologue

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCALE = 0.0625


def check_compiled(form: Form) -> None:
    used = sm90.kernel(form).usage("sm_90a")
    assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0
    assert used.static_shared_bytes == 0


def test_the_form_of_a_rank_of_eight_compiles_without_spills() -> None:
    check_compiled(Form(8, packed=True, way=Way.ONE))


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_compiles_without_spills(form: Form) -> None:
    check_compiled(form)


@pytest.mark.full
def test_rows_together_compile_without_spills() -> None:
    for kernel in (sm90_masked.MHA, sm90_masked.MARK):
        used = kernel.usage("sm_90a")
        assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [1, 8, 9, 16, 17, 64, 128])
@pytest.mark.parametrize("width", [1, 128, 129, 256, 2048, 4096])
def test_a_row_is_added_up_alike_for_one_to_sixteen_rows(heads: int, width: int, packed: bool) -> None:
    cuts = [cut(rows, heads, packed, width, 132) for rows in range(1, INVARIANT_ROWS + 1)]
    units = -(-width // sm90_forms.UNIT)
    parts = {units if how.form.way is not Way.RUNNING else how.blocks for how in cuts}
    assert len(parts) == 1 and all(how.blocks != 3 for how in cuts)
    assert all(how.form.way is not Way.ONE or units <= how.blocks for how in cuts)


@pytest.mark.parametrize("rows", [1, 6, 7, 15, 16, 17, 33, 34, 36, 96, 132, 133, 2048])
@pytest.mark.parametrize("heads", [4, 16, 64, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_cuts_fit_the_device(rows: int, heads: int, packed: bool) -> None:
    for width in (1, 256, 2048, 8192):
        how = cut(rows, heads, packed, width, 132)
        assert how.blocks in (1, 2, 3, 4, 8, 16) and how.form in FORMS
        assert how.form.shared_bytes(-(-width // 128), how.blocks) <= how.shared_bytes <= sm90_forms.MOST_BYTES
        assert how.form.heads >= min(heads, 64)


def test_a_multiprocessor_holds_two_blocks_where_rows_read_bytes() -> None:
    """One works while the other's tokens are on their way."""
    how = cut(2048, 8, True, 2048, 132)
    assert how.form.bulk and how.form.resident == 2 and how.shared_bytes <= sm90_forms.HALF_BYTES
    used = sm90.kernel(how.form).usage("sm_90a")
    assert 2 * how.form.threads * used.registers <= 65536 and used.spill_store_bytes == 0


@pytest.mark.parametrize("heads", [8, 16])
def test_blocks_stay_where_rows_are_more_than_multiprocessors(heads: int) -> None:
    """Two on each, which take row after row."""
    assert not cut(132, heads, False, 2048, 132).form.stays and not cut(133, heads, True, 2048, 132).form.stays
    for rows, across in ((133, 133), (264, 264), (2048, 264)):
        how = cut(rows, heads, False, 2048, 132)
        assert how.form.stays and (how.blocks, how.across, how.form.threads) == (1, across, 128)
        assert 2 * (how.shared_bytes + 1024) <= 228 * 1024, "each block takes 1 KB more"
    used = sm90.kernel(how.form).usage("sm_90a")
    assert 2 * how.form.threads * used.registers <= 65536 and used.spill_store_bytes == 0


def test_many_rows_share_the_processors() -> None:
    assert cut(2048, 64, False, 2048, 132).blocks == cut(2048, 8, True, 2048, 132).blocks == 1
    assert (cut(36, 64, False, 2048, 132).blocks, cut(36, 8, False, 2048, 132).blocks) == (3, 2)
    of_bytes = [cut(rows, 8, True, 2048, 132).blocks for rows in (36, 64, 128, 200)]
    assert of_bytes == [4, 2, 2, 1], "two blocks on a multiprocessor take hardly longer than one"


def arguments(rows: int = 3, heads: int = 8, width: int = 200, pages: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.zeros(rows, heads, 576, dtype=torch.bfloat16)
    cache = torch.zeros(pages, 64, 576, dtype=torch.bfloat16)
    return q, cache, torch.zeros(rows, width, dtype=torch.int32), torch.full((rows,), width, dtype=torch.int32)


def test_other_types_and_widths_go_to_the_reference() -> None:
    draw = Draw(torch.Generator().manual_seed(0), torch.device("cpu"))
    slots, counts = draw.integers(2, 70, low=-1, high=64), draw.listed(70, 3)
    cache = latent_cache(draw, torch.float32)
    narrow = draw.normal(2, 64, 48)
    for q, tokens, latent_dim in ((draw.normal(2, 4, 576), cache, 512), (draw.normal(2, 4, 48), narrow, 32)):
        expected = sparse_mla.reference(q, tokens, slots, counts, SCALE, latent_dim)
        assert torch.equal(sm90.sparse_mla_sm90(q, tokens, slots, counts, SCALE, latent_dim), expected)


def test_what_is_refused() -> None:
    q, cache, slots, counts = arguments()
    with pytest.raises(ValueError, match=r"float32, bfloat16 or uint8, found torch\.float16"):
        sm90.sparse_mla_sm90(q, cache.half(), slots, counts, SCALE, 512)
    with pytest.raises(ValueError, match=r"pages of \(64, 576\), expected \(64, 320\)"):
        sm90.sparse_mla_sm90(q[..., :320], cache, slots, counts, SCALE, 256)


def test_shapes_are_known_without_running() -> None:
    with FakeTensorMode():
        q = torch.empty(3, 8, 576, dtype=torch.bfloat16, device="cuda")
        cache = torch.empty(6, 64, 656, dtype=torch.uint8, device="cuda")
        slots, counts = (torch.empty(*shape, dtype=torch.int32, device="cuda") for shape in ((3, 200), (3,)))
        out = sm90.sparse_mla_sm90(q, cache, slots, counts, SCALE, 512)
    assert out.shape == (3, 8, 512) and out.dtype == torch.bfloat16


def test_the_launch_gets_what_the_source_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(sm90, "kernel", lambda form: lambda how, *given: calls.append((form, how, given)))
    monkeypatch.setattr(sm90, "_processors", lambda device: 132)
    q, cache, slots, counts = arguments(heads=70)
    out = sm90._attend._init_fn(q, cache, slots, counts, SCALE, None)
    stored = torch.zeros(3, dtype=torch.int32)
    sm90._attend._init_fn(q, cache, slots, counts, SCALE, stored)
    sm90._attend._init_fn(q[:, :8], cache, slots, counts, SCALE, stored)
    many = [x.repeat(50, *[1] * (x.dim() - 1)) for x in (q[:, :8], slots, counts)]
    sm90._attend._init_fn(many[0], cache, *many[1:], SCALE, None)
    (form, how, given), (same, _, without), (early, _, extra), (staying, across, last) = calls
    assert staying.stays and across.grid == (150, 1) and last[-1] == 150 and len(last) == len(given) + 1
    assert same == form and len(without) == len(given), "many heads make no use of the promise"
    assert early.early and early.few and extra[-2:] == (stored, 3) and len(extra) == len(given) + 2
    for source in {known.source.path for known in FORMS}:
        declared = re.search(r"sparse_mla\((const u8 \*q.*?float scale)", source.read_text(), re.S)
        names = [part.split()[-1].strip("*") for part in declared[1].split(",")]
        passed = dict(zip(names, given, strict=True))
        assert passed["q"] is q and passed["cache"] is cache and passed["slots"] is slots and passed["counts"] is counts
        assert passed["out"] is out and (passed["heads"], passed["width"]) == (70, 200)
        assert (passed["slots_stride"], passed["q_stride"]) == (200, 70 * 576)
        assert passed["scale"] == pytest.approx(SCALE * 1.4426950408889634)
    assert form == Form(64, packed=False) and how.grid == (3 * 2, 2) and how.cluster == (2,) and how.block == (384,)


def test_only_a_promise_that_a_launch_can_use_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.ops.legato, "sparse_mla", lambda *given: seen.append(given[-1]))
    q, cache, slots, counts = arguments()
    stored = torch.zeros(3, dtype=torch.int32)
    for wide, promise in ((slots, stored), (slots.long(), stored), (slots, stored.long()), (slots, stored.repeat(11))):
        sm90.sparse_mla_sm90(q, cache, wide, counts, SCALE, 512, promise)
    assert seen[0] is stored and seen[1:] == [None] * 3


# On a GPU


def inputs(rows: int, heads: int, width: int, cached: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries and latents with channels, rows and heads of different size; counts 0, 1 and around the units; gaps."""
    draw = Draw(torch.Generator("cuda").manual_seed(seed), torch.device("cuda"))
    cache = latent_cache(draw, cached, pages=512)
    sizes = torch.exp(draw.normal(rows, heads, 1) * 0.7) * 0.3
    q = (draw.normal(rows, heads, 576) * sizes).to(torch.bfloat16)
    slots = torch.stack([draw.distinct(width, 512 * 64) for _ in range(rows)])
    slots = slots.masked_fill(draw.uniform(rows, width) < 0.03, -1)
    counts = draw.integers(rows, low=0, high=width + 1)
    special = draw.listed(width, 0, 1, 127, 128, 129, width - 1)[:rows].clamp_max(width)
    counts[: len(special)] = special
    if rows > 7:
        slots[7] = -1
    return q, cache, slots, counts


def poisoned(cache: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    """The cache with NaN wherever no row's selection points."""
    counted = slots[torch.arange(slots.shape[1], device="cuda") < counts[:, None]].long()
    kept = torch.zeros(cache.shape[0] * 64, dtype=torch.bool, device="cuda")
    kept[counted[counted >= 0]] = True
    flat = cache.view(-1, cache.shape[-1]).clone()
    flat[~kept] = 0xFF if cache.dtype == torch.uint8 else torch.nan
    return flat.view_as(cache)


def in_float64_and_in_bfloat16(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    exact, plain = [], []
    for row in range(len(q)):
        chosen = slots[row, : int(counts[row])]
        tokens = read_latent_rows(cache, chosen[chosen >= 0].long())
        probabilities = torch.softmax(q[row].double() @ tokens.double().T * SCALE, -1)
        exact.append(probabilities @ tokens[:, :512].double())
        short = tokens.to(torch.bfloat16)
        probabilities = torch.softmax((q[row] @ short.T * SCALE).float(), -1).to(torch.bfloat16)
        plain.append(probabilities @ short[:, :512])
    return torch.stack(exact), torch.stack(plain)


def rows_together(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """As above, sixteen rows at a time; every slot of a row within its count is one of a token."""
    tokens = read_latent_rows(cache, torch.arange(cache.shape[0] * 64, device="cuda")).nan_to_num(0.0).to(dtype)
    made = []
    for some, chosen, count in zip(q.split(16), slots.split(16), counts.split(16), strict=True):
        keys = tokens[chosen.long()]
        beyond = torch.arange(chosen.shape[1], device="cuda") >= count[:, None, None]
        scores = (some.to(dtype) @ keys.mT * SCALE).masked_fill_(beyond, -torch.inf)
        probabilities = torch.softmax(scores if dtype is torch.float64 else scores.float(), -1).nan_to_num(0.0)
        made.append(probabilities.to(dtype) @ keys[..., :512])
    return torch.cat(made)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def attend(q: Tensor, cache: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    return sm90.sparse_mla_sm90(q, cache, slots, counts, SCALE, 512)


@gpu
@needs_gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("rows", "heads", "width"),
    [
        *((rows, 8, 2048) for rows in (1, 6, 12, 16, 24, 36)),
        *((rows, 64, 2048) for rows in (6, 36)),
        *((140, 8, 700), (300, 5, 2048), (300, 16, 300), (6, 4, 256), (9, 5, 100), (6, 16, 2048), (40, 16, 300)),
        *((6, 32, 2048), (20, 24, 300), (140, 64, 700), (7, 128, 2048), (6, 8, 4096), (3, 64, 4096)),
    ],
)
def test_error_is_at_most_twice_that_of_bfloat16(rows: int, heads: int, width: int, cached: torch.dtype) -> None:
    q, cache, slots, counts = inputs(rows, heads, width, cached)
    cache = poisoned(cache, slots, counts)
    exact, plain = in_float64_and_in_bfloat16(q, cache, slots, counts)
    found = attend(q, cache, slots, counts)
    assert bool(found.isfinite().all())
    assert relative_error(found, exact) <= 2 * relative_error(plain, exact)
    assert torch.equal(found, attend(q, cache, slots, counts))


@gpu
@needs_gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [4, 8, 64])
def test_a_row_does_not_know_its_neighbours(heads: int, cached: torch.dtype) -> None:
    q, cache, slots, counts = inputs(16, heads, 2048, cached)
    together = attend(q, cache, slots, counts)
    for rows in (1, 6, 12, 15):
        some = attend(q[:rows], cache, slots[:rows], counts[:rows])
        assert torch.equal(some, together[:rows])
    for row in range(16):
        assert torch.equal(attend(q[row:][:1], cache, slots[row:][:1], counts[row:][:1])[0], together[row])


@gpu
@needs_gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 64])
def test_first_and_last_slots(heads: int, cached: torch.dtype) -> None:
    q, cache, slots, counts = inputs(6, heads, 256, cached)
    last = 512 * 64 - 1
    slots[:, ::2], slots[:, 1::2] = slots[:, ::2] % 4, last - slots[:, 1::2] % 4
    exact, plain = in_float64_and_in_bfloat16(q, cache, slots, counts)
    assert relative_error(attend(q, cache, slots, counts), exact) <= 2 * relative_error(plain, exact)


@gpu
@needs_gpu
def test_one_graph_serves_every_count() -> None:
    q, cache, slots, counts = inputs(6, 8, 2048, torch.bfloat16)
    attend(q, cache, slots, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, cache, slots, counts)
    for shift in (0, 1, 2):
        counts.copy_(counts.roll(shift))
        graph.replay()
        assert torch.equal(out, attend(q, cache, slots, counts))


@gpu
@needs_gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("rows", [1, 6, 16, 24])
def test_tokens_that_the_kernel_before_stores_are_not_read_too_early(
    rows: int, heads: int, cached: torch.dtype
) -> None:
    """A product, the prologue and attention in one graph, eight times with caches of their own: the slots that the prologue
    stores hold NaN before, every row sees its own token and those before, and the bits are those without the promise."""
    draw = Draw(torch.Generator("cuda").manual_seed(rows), torch.device("cuda"))
    _, cache, slots, counts = inputs(rows, heads, 2048, cached)
    weight = products.pack_bf16(draw.normal(heads * 256, 2048, dtype=torch.bfloat16, scale=2048**-0.5))
    w_uk = prologue.pack(draw.normal(heads, 192, 512, dtype=torch.bfloat16, scale=192**-0.5))
    x, qkv = draw.normal(rows, 2048, dtype=torch.bfloat16), draw.normal(rows, 2624, dtype=torch.bfloat16)
    stored = draw.distinct(rows, 512 * 64)
    for row in range(rows):
        slots[row, torch.randperm(2048, device="cuda")[: row + 1]] = stored[: row + 1]
    counts[rows // 2 :] = 2048
    norm = LatentNorm(1 + draw.normal(512, dtype=torch.bfloat16, scale=0.2), 1e-5)
    places = Places(*rope_angles.reference(torch.arange(rows, device="cuda") + 9000, 8e6, 64), stored)
    caches = [cache.clone() for _ in range(8)]

    def spoil() -> None:
        for own in caches:
            own.view(-1, own.shape[-1])[stored.long()] = 255 if cached == torch.uint8 else torch.nan

    def chain(promise: Tensor | None) -> list[Tensor]:
        found = []
        for own in caches:
            q = prologue.run_shared(qkv, products.run_bf16(x, weight), w_uk, norm, places, own)
            found.append(sm90.sparse_mla_sm90(q, own, slots, counts, SCALE, 512, promise))
        return found

    spoil()
    expected = chain(None)
    assert all(bool(one.isfinite().all()) for one in expected)
    chain(stored)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(stored)
    for _ in range(3):
        spoil()
        torch.cuda.synchronize()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@gpu
@needs_gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 64])
def test_every_length_from_nothing_to_2048(heads: int, cached: torch.dtype) -> None:
    """Rows of 0, 1, ... 2048 tokens among NaN, sixteen at a time, which is as few as there are in decoding, and all together."""
    draw = Draw(torch.Generator("cuda").manual_seed(3), torch.device("cuda"))
    cache, counts = latent_cache(draw, cached, pages=128), torch.arange(2049, device="cuda", dtype=torch.int32)
    slots = torch.stack([2 * draw.distinct(2048, 64 * 64) for _ in range(64)]).repeat(33, 1)[:2049]
    cache = poisoned(cache, slots, counts)
    q = draw.normal(2049, heads, 576, dtype=torch.bfloat16, scale=0.5)
    exact, plain = (rows_together(q, cache, slots, counts, dtype) for dtype in (torch.float64, torch.bfloat16))
    of_sixteen = zip(q.split(16), slots.split(16), counts.split(16), strict=True)
    for found in (
        torch.cat([attend(some, cache, *selected) for some, *selected in of_sixteen]),
        attend(q, cache, slots, counts),
    ):
        assert not bool(found[0].any())
        errors, usual = ((some.double() - exact).norm(dim=(1, 2))[1:] for some in (found, plain))
        assert bool((errors <= 2 * usual + 0.004 * exact[1:].norm(dim=(1, 2))).all()), "a row is wrong"
        assert relative_error(found, exact) <= 2 * relative_error(plain, exact)


@gpu
@needs_gpu
@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize(("start", "rows"), [(0, 605), (3000, 700)])
def test_a_prompts_rows_together_see_what_they_selected(heads: int, start: int, rows: int) -> None:
    """Queries that lie among others, as a layer with an indexer has them. Rows under k select every token up to their own."""
    draw, length = Draw(torch.Generator("cuda").manual_seed(heads), torch.device("cuda")), start + rows
    _, places, slots, counts = _request(draw, start, rows, 2048, length // 64 + 4)
    units = -(-length // 128)
    masks = sm90_masked.run_mark(slots, counts, places, units)
    assert torch.equal(masks, mark_selected.reference(slots, counts, places, units))
    q = draw.normal(rows, heads * 256 + 4096, dtype=torch.bfloat16)[:, : heads * 256].view(rows, heads, 256)
    kv, rope = draw.normal(length, heads, 448, dtype=torch.bfloat16), draw.normal(length, 64, dtype=torch.bfloat16)
    lengths = place_lengths(torch.arange(start + 1, length + 1, dtype=torch.int32, device="cuda"))
    found = sm90_masked.run_mha(q, kv, rope, lengths, masks, SCALE)
    bits = (masks.unsqueeze(-1) >> torch.arange(64, device="cuda")) & 1
    seen = bits.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)[:rows, :length].bool()
    made = []
    for dtype in (torch.float64, torch.bfloat16):
        keys = torch.cat((kv[..., :192], rope[:, None].expand(-1, heads, -1)), -1).to(dtype)
        scores = torch.einsum("thk,jhk->htj", q.to(dtype), keys).masked_fill(~seen, -torch.inf) * SCALE
        weights = torch.softmax(scores if dtype is torch.float64 else scores.float(), -1).to(dtype)
        made.append(torch.einsum("htj,jhv->thv", weights, kv[..., 192:].to(dtype)))
    assert relative_error(found, made[0]) <= 2 * relative_error(made[1], made[0])
    assert torch.equal(found, sm90_masked.run_mha(q, kv, rope, lengths, masks, SCALE))
