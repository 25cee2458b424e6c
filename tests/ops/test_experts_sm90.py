"""The Hopper experts and router: what is packed where, error, bits, graphs, and what is handed on.

Packing, sizes and compilation are tested on any machine that has the compiler; the rest needs a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import moe_bf16, moe_fp8_block, moe_int4, moe_nvfp4, route
from legato.ops.case import Draw
from legato.ops.experts import sm90_launch, sm90_route
from legato.ops.experts import sm90_packing as packing
from legato.ops.experts.sm90 import pack_bf16
from legato.ops.gemm.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_nvfp4
from legato.ops.gemm.stored import fp8_weight, int4_weight, nvfp4_weight
from legato.ops.op import implemented

EXPERTS, OUTPUTS, INPUTS = 2, 32, 256


@pytest.fixture
def draw() -> Draw:
    return Draw(torch.Generator().manual_seed(1), torch.device("cpu"))


def halves(words: Tensor) -> list[Tensor]:
    """The two bfloat16 of each word, as exact numbers, low half first."""
    low, high = words << 16 & 0xFFFFFFFF, words & 0xFFFF0000
    return [
        torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).double()
        for bits in (low, high)
    ]


def words(octets: Tensor) -> Tensor:
    return octets.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def rotated(word: Tensor, left: int) -> Tensor:
    return (word << left | word >> 32 - left) & 0xFFFFFFFF


def rows_of_lanes(values: Tensor) -> Tensor:
    """[E, strip, step, block, lane, half, column] -> [E, N, K]: what lane 4 g + t has of outputs g and g + 8."""
    experts, strips = values.shape[:2]
    return values.unflatten(4, (8, 4)).permute(0, 1, 6, 4, 2, 3, 5, 7).reshape(experts, strips * 16, -1)


def test_packed_nvfp4_widens_to_the_weight(draw: Draw) -> None:
    """By the kernel's own instructions: rotate, mask, times the scale, whose byte is four bits up under three ones."""
    codes, scale = nvfp4_weight(draw, EXPERTS, OUTPUTS, INPUTS)
    scale[0, 0, 0], scale[1, 3, 5], scale[1, 3, 6] = 0, 2.0**-9 * 3, 448
    packed = packing.pack_nvfp4(codes, scale)
    assert packed.shape == (EXPERTS, OUTPUTS // 16, INPUTS // 128, packing.STEP_BYTES["nvfp4"])
    both_words = words(packed[..., :1024]).view(EXPERTS, 2, 2, 2, 32, 2, 2)
    first, second = both_words.unbind(-1)
    mixed, mask = (first & 0x06030603) | (second & 0xF9FCF9FC), 0x81C081C0
    turned = [(first, 0), (first, 4), (first, 10), (second, 2), (second, 6), (second, 12), (mixed, 8), (mixed, 14)]
    values = torch.stack([half for word, left in turned for half in halves(rotated(word, left) & mask)], dim=-1)
    byte = packed[..., 1024:].view(EXPERTS, 2, 2, 32, 2, 2).permute(0, 1, 2, 4, 3, 5).to(torch.int64)
    scales = halves(byte << 4 | 0x7000)[0]
    found = rows_of_lanes(values * scales.unsqueeze(-1) * packing.NVFP4_FACTOR)
    assert torch.equal(found, dequantize_nvfp4(codes, scale, torch.ones(())).double())


def test_packed_int4_widens_to_the_weight(draw: Draw) -> None:
    codes, scale = int4_weight(draw, EXPERTS, OUTPUTS, INPUTS)
    packed = packing.pack_int4(codes, scale)
    assert packed.shape[-1] == packing.STEP_BYTES["int4"]
    two = words(packed[..., :1024]).view(EXPERTS, 2, 2, 2, 32, 2, 2)
    pairs = [two[..., word] >> 4 * i & 0x000F000F | 0x43004300 for word in (0, 1) for i in range(4)]
    values = torch.stack([half - 136 for pair in pairs for half in halves(pair)], dim=-1)
    scales = packed[..., 1024:].contiguous().view(torch.bfloat16).view(EXPERTS, 2, 2, 8, 2).double()
    found = rows_of_lanes(values * scales.repeat_interleave(4, dim=3)[:, :, :, None, :, :, None])
    assert torch.equal(found, dequantize_int4(codes, scale).double())


def test_packed_fp8_widens_to_the_weight(draw: Draw) -> None:
    """Each eight outputs have a scale of their own in a step."""
    weight, _ = fp8_weight(draw, EXPERTS, OUTPUTS, INPUTS)
    scales = draw.uniform(EXPERTS, OUTPUTS // 8, INPUTS // 128)
    packed = packing.pack_fp8(weight, scales)
    assert packed.shape[-1] == packing.STEP_BYTES["fp8"]
    four = words(packed[..., :2048]).view(EXPERTS, 2, 2, 2, 2, 32, 4).permute(0, 1, 2, 3, 5, 4, 6)
    pairs: list[Tensor] = []
    for word in four.unbind(-1):
        pairs += [word & 0x87F087F0, rotated(word, 28) & 0x87808780 | word << 4 & 0x00700070]
    values = torch.stack([half * 2.0**120 for pair in pairs for half in halves(pair)], dim=-1)
    held = packed[..., 2048:2056].contiguous().view(torch.float32).view(EXPERTS, 2, 2, 1, 1, 2, 1).double()
    by_block = scales.double().repeat_interleave(8, dim=1).repeat_interleave(128, dim=2)
    assert torch.equal(rows_of_lanes(values * held), weight.double() * by_block)


def test_packed_bf16_is_the_weight(draw: Draw) -> None:
    weight = draw.normal(EXPERTS, OUTPUTS, INPUTS, dtype=torch.bfloat16)
    pieces = packing.pack_bf16(weight).view(torch.bfloat16).view(EXPERTS, 2, INPUTS // 64, 2, 2, 32, 8)
    found = pieces.permute(0, 1, 2, 5, 3, 4, 6).flatten(-2).unsqueeze(3)
    assert torch.equal(rows_of_lanes(found), weight)


def test_bf16_experts_leave_a_shared_one_in_fp8_as_it_is_stored() -> None:
    """No launch takes the two together: the shared expert's products compute it."""
    w13, w2 = torch.randn(2, 256, 128).bfloat16(), torch.randn(2, 128, 128).bfloat16()
    gate_up, down = torch.randn(256, 128).to(torch.float8_e4m3fn), torch.randn(128, 128).to(torch.float8_e4m3fn)
    scales = torch.ones(2, 1), torch.ones(1, 1)
    packed = pack_bf16(w13, w2, gate_up, down, *scales)
    assert packed[0].dtype is torch.uint8
    assert all(found is given for found, given in zip(packed[2:], (gate_up, down, *scales), strict=True))


def test_a_tile_has_eight_gate_rows_and_their_up_rows() -> None:
    rows = torch.arange(64).view(1, 64, 1)
    tiles = packing.together(rows).flatten().tolist()
    assert tiles[:16] == [*range(8), *range(32, 40)] and tiles[48:] == [*range(24, 32), *range(56, 64)]
    assert packing.together(torch.arange(8).view(1, 8, 1), group=1).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_router_is_the_sum_of_its_terms() -> None:
    weight = torch.randn(20, 128)
    for stored, terms in ((weight, 3), (weight.bfloat16().float(), 1)):
        kept = sm90_route.pack(stored)
        assert kept.packed.shape == (terms, 2, 2, 2048)
        assert torch.equal(sm90_route.restore(kept.stored), stored)


@pytest.mark.parametrize("rows", [1, 6, 8, 16, 64, 128])
@pytest.mark.parametrize("routed", ["bf16", "fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("shape", [(6144, 256), (6144, 2048), (256, 256)], ids=str)
def test_every_cut_fits_the_multiprocessor(shape: tuple[int, int], routed: str, rows: int) -> None:
    hidden, width = shape
    cut = sm90_launch.cut(sm90_launch.Experts(routed, "bf16", hidden, width, 256, 132), rows, 8)
    macros = dict(cut.macros)
    assert macros["SLOTS"] >= 2 and 1 <= macros["CHUNK"] <= 3
    assert cut.shared_bytes <= 226 * 1024 and macros["X_ROWS"] >= min(rows, 6)
    assert macros["SHARERS"] == (4 if rows > 8 and hidden == 6144 else 16)


def test_the_source_compiles() -> None:
    """And counts the shared memory as the launch does, which it asserts; here for one step a copy and no shared expert."""
    what = sm90_launch.Experts("nvfp4", None, 128, 128, 8, 132)
    made, dynamic = sm90_launch.kernel(what, 6, 2)
    usage = made.usage("sm_90a")
    assert usage.spill_load_bytes == 0 and usage.static_shared_bytes + dynamic <= 227 * 1024


@pytest.mark.full
@pytest.mark.parametrize("routed", ["bf16", "fp8", "int4", "nvfp4"])
def test_every_format_compiles_and_fits(routed: str) -> None:
    for hidden, width, rows in ((6144, 256, 1), (6144, 256, 6), (6144, 2048, 16), (6144, 256, 128), (6144, 2048, 128)):
        what = sm90_launch.Experts(routed, "bf16", hidden, width, 256, 132)
        made, dynamic = sm90_launch.kernel(what, rows, 8)
        usage = made.usage("sm_90a")
        assert usage.static_shared_bytes + dynamic <= 227 * 1024 and (rows < 128 or usage.spill_store_bytes == 0)


class Mixture:
    """Experts in one format with a shared one, packed, and their exact values."""

    OPS: ClassVar = {"bf16": moe_bf16, "fp8": moe_fp8_block, "int4": moe_int4, "nvfp4": moe_nvfp4}

    def __init__(self, form: str, experts: int, width: int, hidden: int) -> None:
        implemented("sm90")
        draw = Draw(torch.Generator("cuda").manual_seed(0), torch.device("cuda"))
        self.draw, self.width, self.experts, self.hidden = draw, width, experts, hidden
        shapes = (experts, 2 * width, hidden), (experts, hidden, width)
        match form:
            case "nvfp4":
                (p13, s13), (p2, s2) = (nvfp4_weight(draw, *shape) for shape in shapes)
                g13 = draw.uniform(experts, 2, low=0.5, high=1.5) * hidden**-0.5 / 800
                g2 = draw.uniform(experts, low=0.5, high=1.5) * width**-0.5 / 800
                stored = (p13, s13, g13, p2, s2, g2)
                self.w13 = dequantize_nvfp4(p13, s13, g13.repeat_interleave(width, dim=1))
                self.w2 = dequantize_nvfp4(p2, s2, g2)
            case "fp8":
                stored = tuple(part for shape in shapes for part in fp8_weight(draw, *shape))
                self.w13, self.w2 = dequantize_fp8_block(*stored[:2]), dequantize_fp8_block(*stored[2:])
            case "int4":
                stored = tuple(part for shape in shapes for part in int4_weight(draw, *shape))
                self.w13, self.w2 = dequantize_int4(*stored[:2]), dequantize_int4(*stored[2:])
            case _:
                stored = tuple(draw.normal(*shape, dtype=torch.bfloat16, scale=shape[-1] ** -0.5) for shape in shapes)
                self.w13, self.w2 = stored[0].float(), stored[1].float()
        self.shared = (
            draw.normal(2 * width, hidden, dtype=torch.bfloat16, scale=hidden**-0.5),
            draw.normal(hidden, width, dtype=torch.bfloat16, scale=width**-0.5),
        )
        op = self.OPS[form].implementations["sm90"]
        assert op.pack is not None
        self.run, self.weights = op.run, op.pack(*stored, *self.shared)

    def rows(self, count: int, choices: int) -> tuple[Tensor, Tensor, Tensor]:
        """x between rows of NaN; the last row masked, and one choice of another."""
        padded = torch.full((count + 9, self.hidden), float("nan"), device="cuda", dtype=torch.bfloat16)
        padded[1 : count + 1] = self.draw.normal(count, self.hidden).bfloat16()
        ids = self.draw.uniform(count, self.experts).argsort(1)[:, :choices].to(torch.int32)
        if count > 1:
            ids[count // 2, -1], ids[-1] = -1, -1
        return padded[1 : count + 1], ids, self.draw.uniform(count, choices, low=0.1)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.run(x, ids.contiguous(), weights.contiguous(), *self.weights)

    def _sum(self, x: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        def expert(rows: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            gate, up = functional.linear(rows, w13.to(dtype)).chunk(2, dim=-1)
            return functional.linear(functional.silu(gate) * up, w2.to(dtype))

        total = expert(x.to(dtype), *self.shared).double()
        for number in range(self.experts):
            row, choice = (ids == number).nonzero(as_tuple=True)
            if len(row):
                made = expert(x[row].to(dtype), self.w13[number], self.w2[number])
                total.index_add_(0, row, made.double() * weights[row, choice].double().unsqueeze(1))
        return total

    def check(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Error against float64 at most twice that of plain bfloat16. Returns the result."""
        exact, made = self._sum(x, ids, weights, torch.float64), self(x, ids, weights)
        plain = self._sum(x, ids, weights, torch.bfloat16).bfloat16()
        error, allowed = (float((y.double() - exact).norm() / exact.norm()) for y in (made, plain))
        assert error <= 2 * allowed, f"error {error:.2e}, plain bfloat16 has {allowed:.2e}"
        return made


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("form", ["bf16", "fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("shape", [(8, 256, 256, 2), (24, 256, 6144, 8), (10, 2048, 6144, 8)], ids=str)
def test_error_and_bits(form: str, shape: tuple[int, int, int, int], uninitialised_is_nan: None) -> None:
    """Error at 1 row to as many as a launch takes; a row's bits are as alone, up to 16 rows, and as in launches of 64; repeated
    calls and a graph agree."""
    mixture, choices = Mixture(form, *shape[:3]), shape[3]
    for count in (1, 6, 16, 64, 96, sm90_launch.MOST_ROWS):
        x, ids, weights = mixture.rows(count, choices)
        made = mixture.check(x, ids, weights)
        if count > 64:
            parts = [mixture(*some) for some in zip(x.split(64), ids.split(64), weights.split(64), strict=True)]
            assert torch.equal(torch.cat(parts), made)
        assert torch.equal(made, mixture(x, ids, weights))
        for row in {0, count // 2, count - 1} if count <= 16 else ():
            alone = mixture(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
            assert torch.equal(alone[0], made[row]), f"row {row} of {count}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = mixture(x, ids, weights)
    graph.replay()
    assert torch.equal(replayed, made)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("form", ["bf16", "fp8", "int4", "nvfp4"])
def test_more_rows_than_one_launch_takes(form: str) -> None:
    mixture = Mixture(form, 16, 256, 512)
    for count in (65, 200, 700):
        mixture.check(*mixture.rows(count, 4))


@pytest.mark.gpu
@needs_gpu
def test_a_skewed_routing_is_right() -> None:
    """Every row on the same experts, one expert with all rows, and rows that name an expert twice."""
    mixture = Mixture("nvfp4", 8, 256, 512)
    for count, choices in ((6, 2), (16, 2), (128, 6)):
        x, ids, weights = mixture.rows(count, choices)
        for chosen in (torch.tensor([3, 5, 0, 2, 6, 7])[:choices], torch.tensor([1, 1, 0, 3, 4, 4])[:choices]):
            mixture.check(x, chosen.to(ids).expand_as(ids), weights)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("terms", [1, 3])
def test_the_router_chooses_what_the_reference_does(terms: int) -> None:
    implemented("sm90")
    sm90 = route.implementations["sm90"]
    assert sm90.pack is not None
    for experts, hidden, k in ((256, 6144, 8), (8, 256, 2)):
        weight = torch.randn(experts, hidden, device="cuda") * hidden**-0.5
        weight = weight.bfloat16().float() if terms == 1 else weight
        bias, packed = torch.randn(experts, device="cuda") * 0.3, sm90.pack(weight)
        for count in (1, 6, 16, 64, 96):
            x = torch.randn(count, hidden, device="cuda").bfloat16()
            ids, weights = sm90.run(x, packed, bias, k, 2.5)
            gates = torch.sigmoid(x.double() @ weight.double().t())
            ranked = (gates + bias.double()).sort(dim=-1, descending=True)
            near = (ranked.values[:, :k] - ranked.values[:, 1 : k + 1]).amin(1) < 1e-6
            assert torch.equal(ids[~near].long(), ranked.indices[:, :k][~near])
            chosen = gates.gather(1, ids.long())
            assert torch.allclose(weights.double(), chosen / chosen.sum(-1, keepdim=True) * 2.5, rtol=1e-5, atol=1e-6)
            one = sm90.run(x[:1], packed, bias, k, 2.5)
            assert torch.equal(one[0][0], ids[0]) and torch.equal(one[1][0], weights[0])


def test_a_launch_is_compiled_for_few_classes_of_rows() -> None:
    assert {sm90_launch.row_class(rows) for rows in range(1, 129)} == {1, 2, 4, 6, 8, 16, 32, 64, 128}
    what = sm90_launch.Experts("nvfp4", None, 256, 256, 8, 132)
    assert sm90_launch.cut(what, 6, 2) != sm90_launch.cut(replace(what, shared="bf16"), 6, 2)


def test_tables_bound_the_rows_of_a_launch() -> None:
    """Which of a launch's pairs name an expert has to fit the room of a tile's rows."""

    def most(form: str, hidden: int, experts: int) -> int:
        return sm90_launch.most_rows(sm90_launch.Experts(form, None, hidden, 256, experts, 132), 8)

    assert [most("nvfp4", 6144, experts) for experts in (8, 256, 768)] == [128, 128, 64]
    assert [most("fp8", 6144, experts) for experts in (8, 256, 512)] == [128, 128, 128]
    assert [most("int4", 256, experts) for experts in (8, 256, 512)] == [128, 128, 64]
