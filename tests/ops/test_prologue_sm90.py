"""The prologue on Hopper: error, bytes of both caches, bits in company, and what it leaves alone.

The packed order and the compilation are tested on any machine that has the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import build, rope_angles
from legato.ops.cache import index_cache, latent_cache
from legato.ops.case import Draw
from legato.ops.gemm import sm90 as products
from legato.ops.gemm import sm90_heads
from legato.ops.prologue import IndexNorm, LatentNorm, Places, prologue_full, sm90, sm90_unfused

#: Q, H, N: the checkpoint that ships with Legato, one rank of eight of GLM-5.2, and all of it.
SMALL, RANK_OF_8, WHOLE = (128, 4, 64), (2048, 8, 192), (2048, 64, 192)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_lane_finds_its_outputs_side_by_side() -> None:
    weight = torch.arange(2 * 48 * 96, dtype=torch.int32).view(2, 48, 96)
    packed = sm90_heads.arrange(weight)
    assert packed.shape == (2, 6, 3, 32, 8) and not torch.equal(packed.flatten(), weight.flatten())
    # Head 1, outputs 32..47, second tile: its column 5 is output 2 * 4 + 2 + 1; lane 5 * 4 + 3 has K 24..31 of a block.
    assert packed[1, 5, 2, 23, 4] == weight[1, 32 + 11, 64 + 28]


def test_shapes_that_no_kernel_serves_stay_as_they_are() -> None:
    for shape, dtype in (((4, 24, 512), torch.bfloat16), ((4, 64, 96), torch.bfloat16), ((4, 64, 512), torch.float32)):
        w_uk = torch.zeros(shape, dtype=dtype)
        assert sm90.pack(w_uk) is w_uk
    served_by_none = torch.zeros(4, 8, 512, dtype=torch.bfloat16)
    assert sm90_heads.pack(served_by_none) is served_by_none


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.uint8], ids=str)
def test_the_sources_compile_without_spills(cached: torch.dtype) -> None:
    full = sm90.kernel(192, 512, 32, cached)
    for kernel in (full, sm90.kernel(64, 512, 0, cached), sm90_heads.kernel(512)[0], sm90_unfused.kernel("hadamard")):
        usage = kernel.usage("sm_90a")
        assert usage.spill_store_bytes == usage.spill_load_bytes == 0
    # With 128 registers a multiprocessor holds two blocks beside one of the products' (256 threads of 128 registers).
    assert full.usage("sm_90a").registers <= 128


def small_call(rank: int) -> dict[str, Any]:
    """`prologue_shared` of two rows behind a query latent of `rank` numbers, for a CPU."""
    draw = Draw(torch.Generator().manual_seed(rank), torch.device("cpu"))
    cos, sin = (x.contiguous() for x in rope_angles.reference(draw.listed(5, 70), 8e6, 64))
    return {
        "qkv": draw.normal(2, rank + 576, dtype=torch.bfloat16),
        "q": draw.normal(2, 4 * 128, dtype=torch.bfloat16),
        "w_uk": draw.normal(4, 64, 512, dtype=torch.bfloat16, scale=0.1),
        "norm": LatentNorm(torch.ones(512, dtype=torch.bfloat16), 1e-5),
        "places": Places(cos, sin, draw.listed(3, -1)),
        "cache": latent_cache(draw, torch.bfloat16),
    }


def kernels_of(call: dict[str, Any]) -> int:
    """How many kernels a call launches: they are noted instead."""
    build.STORE.noted = {}
    try:
        sm90.run_shared(**{**call, "w_uk": sm90.pack(call["w_uk"])})
        return len(build.STORE.noted)
    finally:
        build.STORE.noted = None


@pytest.mark.parametrize(("rank", "kernels"), [(128, 1), (136, 1), (132, 0), (129, 0)])
def test_widths_whose_loads_would_be_misaligned_go_to_the_reference(rank: int, kernels: int) -> None:
    assert kernels_of(small_call(rank)) == kernels


def test_types_and_gaps_that_the_kernel_does_not_read_go_to_the_reference() -> None:
    call = small_call(128)
    wider = torch.zeros(*call["cache"].shape[:2], 592, dtype=torch.bfloat16)
    places = call["places"]
    for changed, kernels in (
        ({"norm": LatentNorm(torch.ones(512), 1e-5)}, 0),
        ({"cache": wider[..., :576]}, 0),
        ({"cache": call["cache"].float()}, 0),
        ({"places": replace(places, cos=torch.stack((places.cos, places.sin), -1)[..., 0])}, 1),  # read from a copy
        ({"qkv": torch.zeros(2, 720, dtype=torch.bfloat16)[:, 1:705]}, 1),
    ):
        assert kernels_of({**call, **changed}) == kernels, changed


class Inputs:
    """One call, its caches among poisoned slots."""

    def __init__(self, shape: tuple[int, int, int], rows: int, cached: torch.dtype) -> None:
        rank, self.heads, self.nope = shape
        draw = Draw(torch.Generator("cuda").manual_seed(rows), torch.device("cuda"))
        width = rank + 576 + 160
        padded = draw.normal(rows, width + 16, dtype=torch.bfloat16) * 10.0 ** draw.integers(rows, 1, low=-2, high=3)
        self.qkv = padded.bfloat16()[:, :width]
        self.q = draw.normal(rows, self.heads * (self.nope + 64) + 4096, dtype=torch.bfloat16)
        self.w_uk = draw.normal(self.heads, self.nope, 512, dtype=torch.bfloat16, scale=self.nope**-0.5)
        self.norm = LatentNorm(1 + draw.normal(512, dtype=torch.bfloat16, scale=0.2), 1e-5)
        weight, bias = 1 + draw.normal(128, scale=0.2), draw.normal(128, scale=0.1)
        self.index_norm = IndexNorm(weight.bfloat16(), bias.bfloat16(), 1e-6)
        cos, sin = rope_angles.reference(draw.integers(rows, low=0, high=1 << 20), 8e6, 64)
        slots = draw.distinct(rows, 384)
        slots[: min(rows, 4)] = draw.listed(0, 63, 64, 383)[:rows]
        slots[4:] = torch.where(torch.isin(slots[4:], draw.listed(0, 63, 64, 383)), -1, slots[4:])
        slots[3::7] = -1
        self.places = Places(cos, sin, slots)
        self.cache, self.keys = latent_cache(draw, cached), index_cache(draw, torch.uint8)
        for poisoned in (self.cache, self.keys):
            poisoned.view(torch.uint8).fill_(255)

    def full(self, run, w_uk: Tensor, rows: Tensor | slice = slice(None)) -> tuple[Tensor, ...]:
        """Query, index query, gates, and both caches after a call over some of the rows."""
        places = Places(self.places.cos[rows], self.places.sin[rows], self.places.slots[rows])
        cache, keys = self.cache.clone(), self.keys.clone()
        made = run(self.qkv[rows], self.q[rows], w_uk, self.norm, self.index_norm, places, cache, keys)
        return *made, cache, keys

    def shared(self, run, w_uk: Tensor) -> tuple[Tensor, Tensor]:
        cache = self.cache.clone()
        q = self.q[:, : self.heads * (self.nope + 64)]
        return run(self.qkv[:, :-160], q, w_uk, self.norm, self.places, cache), cache


def differing_bytes(found: Tensor, expected: Tensor) -> int:
    return int((found.view(torch.uint8) != expected.view(torch.uint8)).sum())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [SMALL, RANK_OF_8, WHOLE], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 9, 16, 37, 130])
def test_against_float64_and_the_reference_s_bytes(shape: tuple[int, int, int], rows: int, cached: torch.dtype) -> None:
    """The query within twice a plain product's error; caches, keys, index queries and gates byte for byte the reference's,
    but for a rounding of a norm or a rotation here and there that fell the other way."""
    case = Inputs(shape, rows, cached)
    packed = sm90.pack(case.w_uk)
    q, index_q, gates, cache, keys = case.full(sm90.run_full, packed)
    expected = case.full(prologue_full.reference, case.w_uk)
    heads = case.q[:, : case.heads * (case.nope + 64)].view(rows, case.heads, -1)
    exact = torch.einsum("thn,hnc->thc", heads[..., : case.nope].double(), case.w_uk.double())
    plain = torch.einsum("thn,hnc->thc", heads[..., : case.nope], case.w_uk)
    error, measure = ((made.double() - exact).norm() for made in (q[..., :512], plain))
    assert error <= 2 * measure
    for found, reference in zip((q[..., 512:].contiguous(), index_q, gates, cache, keys), (
        expected[0][..., 512:].contiguous(), *expected[1:]), strict=True):  # fmt: skip
        assert differing_bytes(found, reference) <= max(2, found.nbytes // 20_000)
    own = case.heads * (case.nope + 64)
    kept = case.q.clone()
    wholly = case.full(partial(sm90.run_full, whole=True), packed)
    case.q = kept
    assert torch.equal(wholly[0][..., : case.nope], kept[:, :own].view(rows, case.heads, -1)[..., : case.nope])
    assert torch.equal(wholly[0][..., case.nope :], q[..., 512:])
    for found, reference in zip(wholly[1:], (index_q, gates, cache, keys), strict=True):
        assert differing_bytes(found, reference) == 0
    shared_q, shared_cache = case.shared(sm90.run_shared, packed)
    assert torch.equal(shared_q, q) and torch.equal(shared_cache.view(torch.uint8), cache.view(torch.uint8))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", [SMALL, RANK_OF_8], ids=str)
def test_bits_of_a_row_in_any_company(shape: tuple[int, int, int]) -> None:
    case = Inputs(shape, 37, torch.uint8)
    packed = sm90.pack(case.w_uk)
    whole = case.full(sm90.run_full, packed)[:3]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(case.full(sm90.run_full, packed), whole)
    )
    for count in (1, 2, 6, 7, 8, 9, 16):
        places = torch.randperm(37, device="cuda")[:count]
        made = case.full(sm90.run_full, packed, places)[:3]
        assert all(differing_bytes(a, b[places].contiguous()) == 0 for a, b in zip(made, whole))


@pytest.mark.gpu
@gpu
def test_what_no_kernel_serves_goes_to_the_reference() -> None:
    """Float32 rows, half rotation and unquantised keys, in a captured graph: nothing there waits for the host."""
    case = Inputs(SMALL, 6, torch.bfloat16)
    packed = sm90.pack(case.w_uk)
    half = replace(case.index_norm, rotation="half")
    keys = torch.zeros(6, 64, 128, device="cuda")
    for norm, cached in ((half, case.keys), (case.index_norm, keys)):
        arguments = case.qkv, case.q, packed, case.norm, norm, case.places
        expected = prologue_full.reference(
            case.qkv, case.q, case.w_uk, case.norm, norm, case.places, case.cache.clone(), cached.clone()
        )
        sm90.run_full(*arguments, case.cache.clone(), cached.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = sm90.run_full(*arguments, case.cache, cached)
        graph.replay()
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rows", [1, 6, 9, 16, 40, 200])
@pytest.mark.parametrize("shape", [(8, 256, 512), (4, 64, 512), (64, 256, 512), (8, 512, 192), (4, 512, 64)], ids=str)
def test_heads_against_float64(shape: tuple[int, int, int], rows: int) -> None:
    weight = (torch.randn(shape, device="cuda") * shape[2] ** -0.5).bfloat16()
    x = torch.randn(rows, shape[0], shape[2] + 64, device="cuda").bfloat16()[..., : shape[2]]
    packed = sm90_heads.pack(weight)
    found, exact = sm90_heads.run(x, packed), torch.einsum("thk,hnk->thn", x.double(), weight.double())
    plain = torch.einsum("thk,hnk->thn", x, weight)
    assert (found.double() - exact).norm() <= 2 * (plain.double() - exact).norm()
    for row in range(0, rows if rows <= sm90_heads.MOST_ROWS else 0, 5):  # beyond, the library multiplies
        assert torch.equal(sm90_heads.run(x[row : row + 1], packed)[0], found[row])


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", [(2048, 2048), (6144, 2048), (4608, 128), (512, 128), (20480, 2048)], ids=str)
def test_normed_products_against_float64(shape: tuple[int, int]) -> None:
    inputs = shape[1]
    weight = (torch.randn(shape, device="cuda") * inputs**-0.5).bfloat16()
    norm = (1 + 0.2 * torch.randn(inputs, device="cuda")).bfloat16()
    x = (torch.randn(16, inputs + 736, device="cuda") * 10.0 ** torch.randint(-2, 3, (16, 1), device="cuda")).bfloat16()
    x = x[:, :inputs]
    packed = products.pack_bf16(weight)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    exact = normed @ weight.double().T
    plain = torch.nn.functional.linear(normed.bfloat16(), weight)
    found = products.run_normed(x, norm, 1e-5, packed)
    assert (found.double() - exact).norm() <= 2 * (plain.double() - exact).norm()
    assert torch.equal(products.run_normed(x, norm, 1e-5, packed), found)
    for first, count in ((0, 1), (3, 6), (8, 8), (2, 9), (15, 1)):
        assert torch.equal(
            products.run_normed(x[first : first + count], norm, 1e-5, packed), found[first : first + count]
        )
