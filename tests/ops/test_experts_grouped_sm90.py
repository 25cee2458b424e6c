"""Many rows of the Hopper experts: sorted rows and products of whole experts; and the router for many rows.

Sizes and compilation are tested on any machine that has the compiler; the rest needs a GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import route
from legato.ops.experts import sm90_grouped, sm90_launch, sm90_route
from legato.ops.op import implemented
from tests.ops.test_experts_sm90 import Mixture, needs_gpu

FORMS = tuple(sm90_grouped.FORMS)
CUTS = [(form, cut) for form, cuts in sm90_grouped.FORMS.items() for cut in cuts]


@pytest.mark.parametrize(("form", "cut"), CUTS, ids=str)
def test_the_rings_fit_the_multiprocessor(form: str, cut: sm90_grouped.Form) -> None:
    kernel, shared_bytes = sm90_grouped.product(form, cut)
    macros = kernel.source.defines
    assert int(macros["STAGES"]) >= 2 and int(macros["SLOTS"]) >= 2
    static = 8 * sm90_grouped.MOST_TILES + 1024
    assert shared_bytes + static <= 227 * 1024


def test_tables_bound_experts_and_choices() -> None:
    """However the pairs are spread, the tiles of a launch fit its list."""
    assert sm90_grouped.serves(256, 8) and not sm90_grouped.serves(1024, 8) and not sm90_grouped.serves(256, 33)
    for _, cut in CUTS:
        for experts, choices in ((256, 8), (512, 32), (8, 2)):
            rows = sm90_grouped.rows_held(cut, experts, choices)
            assert rows >= 1 and experts + rows * choices // cut.columns <= sm90_grouped.MOST_TILES


def test_a_call_is_cut_as_is_fastest() -> None:
    """By NVFP4's rows of a call of 256 experts and 8 choices, the columns that were the fastest of those measured on an H200
    (records/2026-12-01-experts-leaner); sixteen warps need outputs that they divide."""
    fastest = {256: 16, 320: 16, 384: 32, 512: 32, 768: 32, 1024: 48, 1280: 64, 1536: 64, 2048: 80, 2560: 96, 8192: 96}
    found = {rows: sm90_grouped.form_for("nvfp4", 6144, rows * 8 / 256).columns for rows in fastest}
    assert found == fastest
    for form, _ in CUTS:
        for mean in (1, 50, 1000):
            assert 128 % (16 * sm90_grouped.form_for(form, 128, mean).warps) == 0


@pytest.mark.full
@pytest.mark.parametrize(("form", "cut"), CUTS, ids=str)
def test_products_compile_without_spills(form: str, cut: sm90_grouped.Form) -> None:
    kernel, shared_bytes = sm90_grouped.product(form, cut)
    usage = kernel.usage("sm_90a")
    assert usage.spill_store_bytes == 0 and usage.static_shared_bytes + shared_bytes <= 227 * 1024


def test_what_stands_around_compiles() -> None:
    for name in ("plan_pairs", "sort_rows", "sum_choices"):
        assert sm90_grouped.around(name, 256).usage("sm_90a").spill_store_bytes == 0


def test_router_terms_are_the_weight() -> None:
    weight = torch.randn(20, 128)
    assert torch.equal(sm90_route.pack(weight).stored.float().flip(0).cumsum(0)[-1], weight)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(8, 128, 256, 2), (24, 256, 6144, 8), (10, 2048, 512, 8)], ids=str)
def test_error_bits_and_graph(
    form: str, shape: tuple[int, int, int, int], uninitialised_is_nan: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At counts that leave part of a tile, with several tiles of an expert, in every cut; repeated calls and a graph agree."""
    mixture, choices = Mixture(form, *shape[:3]), shape[3]
    for cut in sm90_grouped.FORMS[form]:
        with monkeypatch.context() as patched:
            patched.setitem(sm90_grouped.FORMS, form, (cut,))
            mixture.check(*mixture.rows(333, choices))
    for count in (sm90_launch.MOST_ROWS + 1, 333, 700):
        x, ids, weights = mixture.rows(count, choices)
        made = mixture.check(x, ids, weights)
        assert torch.equal(made, mixture(x, ids, weights))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = mixture(x, ids, weights)
    graph.replay()
    assert torch.equal(replayed, made)


@pytest.mark.gpu
@needs_gpu
def test_skewed_routing_and_more_rows_than_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows on the same experts, an expert named twice, no expert at all; and a call cut into pieces."""
    mixture = Mixture("nvfp4", 8, 256, 512)
    x, ids, weights = mixture.rows(600, 2)
    for chosen in (torch.tensor([3, 5]), torch.tensor([1, 1]), torch.tensor([-1, 8]), torch.tensor([7, -1])):
        mixture.check(x, chosen.to(ids).expand_as(ids).where(chosen.to(ids) < 8, -1), weights)
    whole = mixture(x, ids, weights)
    monkeypatch.setattr(sm90_grouped, "MOST_ROWS", 256)
    mixture.check(x, ids, weights)
    assert torch.allclose(mixture(x, ids, weights).float(), whole.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("terms", [1, 3])
def test_the_router_of_many_rows(terms: int) -> None:
    implemented("sm90")
    op = route.implementations["sm90"]
    assert op.pack is not None
    for experts, hidden, k in ((256, 6144, 8), (40, 512, 4), (8, 256, 2)):
        weight = torch.randn(experts, hidden, device="cuda") * hidden**-0.5
        weight = weight.bfloat16().float() if terms == 1 else weight
        bias, packed = torch.randn(experts, device="cuda") * 0.3, op.pack(weight)
        for count in (200, 1000):
            x = torch.randn(count, hidden, device="cuda").bfloat16()
            ids, weights = op.run(x, packed, bias, k, 2.5)
            gates = torch.sigmoid(x.double() @ weight.double().t())
            ranked = (gates + bias.double()).sort(dim=-1, descending=True)
            near = (ranked.values[:, :k] - ranked.values[:, 1 : k + 1]).amin(1) < 3e-6
            assert torch.equal(ids[~near].long(), ranked.indices[:, :k][~near])
            chosen = gates.gather(1, ids.long())
            expected = chosen / chosen.sum(-1, keepdim=True) * 2.5
            assert torch.allclose(weights.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@needs_gpu
def test_equal_ranks_go_to_the_lower_expert() -> None:
    implemented("sm90")
    op = route.implementations["sm90"]
    assert op.pack is not None
    packed, bias = op.pack(torch.zeros(256, 512, device="cuda")), torch.zeros(256, device="cuda")
    ids, weights = op.run(torch.randn(300, 512, device="cuda").bfloat16(), packed, bias, 8, 2.5)
    assert torch.equal(ids, torch.arange(8, device="cuda", dtype=torch.int32).expand(300, 8))
    assert torch.allclose(weights, torch.full_like(weights, 2.5 / 8))
