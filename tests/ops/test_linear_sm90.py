"""The Hopper products, of few rows and of more: error, bits, order in a graph, and what is handed on to the library.

The packed layout, the tilings' sizes and the compilation are tested on any machine that has the compiler.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("tests.ops.nvrtc")

from legato.ops.gemm import (
    linear_bf16,
    linear_bf16_best,
    linear_bf16_normed,
    linear_fp8_block,
    linear_fp8_block_best,
    linear_fp8_block_normed,
    linear_swiglu,
    sm90,
    sm90_many,
    sm90_packing,
    sm90_tiling,
)
from legato.ops.gemm.dequantize import dequantize_fp8_block
from legato.ops.op import implemented
from legato.ops.pointwise import rms_norm
from legato.ops.sample.ranks import token_of

SHAPES = sorted(sm90_tiling.RECORDED)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("strips", [1, 2, 3])
def test_a_packed_weight_can_be_restored(strips: int, bits: int) -> None:
    """Groups that divide the outputs, and a last group that is smaller."""
    weight = torch.randint(0, 256, (80, 192), dtype=torch.uint8)
    weight = weight if bits == 8 else weight.to(torch.bfloat16)
    cut = sm90_tiling.cut(5, 192 * bits // 512, sm90_tiling.Recorded(strips, 1, 48), bits)
    packed = sm90_packing.arrange(weight, cut)
    assert packed.shape == (5, 192 * bits // 512, 2, 32, 128 // bits)
    assert not torch.equal(packed.flatten(), weight.flatten())
    assert torch.equal(sm90_packing.restore(packed, cut), weight)


def test_interleaved_codes_can_be_separated() -> None:
    """Every byte at every place of a word; the first pair of a word lies where bfloat16 has sign, exponent and mantissa."""
    codes = torch.randint(0, 256, (5, 6, 2, 32, 16), dtype=torch.uint8)
    codes.view(-1)[:1024] = torch.arange(1024).to(torch.uint8)
    made = sm90_packing.interleaved(codes)
    assert torch.equal(sm90_packing.separated(made), codes) and not torch.equal(made, codes)
    words = made.reshape(-1, 4).view(torch.int32)[:, 0] & 0x87F0
    exact = codes.reshape(-1, 4)[:, 0].view(torch.float8_e4m3fn).to(torch.float32)
    scaled = (words.to(torch.int32) << 16).view(torch.float32) * 2.0**60 * 2.0**60
    assert torch.equal(scaled[exact.isfinite()], exact[exact.isfinite()])


def test_where_a_weight_lies_when_packed() -> None:
    """Lane 4 * output + piece has two pairs of K of that output and of the eighth after it in turn, then the next two; a group's
    strips share a block of K."""
    weight = torch.arange(48 * 64, dtype=torch.int32).view(48, 64)
    cut = sm90_tiling.cut(3, 2, sm90_tiling.Recorded(3, 1, 48), 16)
    packed = sm90_packing.arrange(weight, cut).flatten()
    block, strip, half, lane, pair, upper = 1, 2, 1, 13, 1, 1
    place = (((block * 3 + strip) * 2 + half) * 32 + lane) * 8 + pair * 4 + upper * 2 + 1
    expected = weight[strip * 16 + upper * 8 + lane // 4, block * 32 + lane % 4 * 8 + half * 4 + pair * 2 + 1]
    assert packed[place] == expected


def test_a_gated_weight_can_be_restored() -> None:
    """Fours of gates and of their ups in turn."""
    weight = torch.arange(48 * 64, dtype=torch.int32).view(48, 64)
    assert sm90_packing.in_turn(weight)[:, 0].tolist()[:12] == [
        64 * row for row in (0, 1, 2, 3, 24, 25, 26, 27, 4, 5, 6, 7)
    ]
    gate_up = torch.randn(576, 256).bfloat16()
    kept, cut = sm90.pack_swiglu(gate_up), sm90_tiling.tiling(576, 256, 16)
    assert isinstance(kept, sm90_packing.Kept) and cut is not None and kept.stored is gate_up
    assert torch.equal(sm90_packing.restore_swiglu(kept.packed, cut), gate_up)
    for other in (gate_up.float(), gate_up[:568]):
        assert sm90.pack_swiglu(other) is other


#: Of the shipped checkpoint, of other ranks and of other models, none recorded.
UNRECORDED = (
    *((n, k, 16) for n, k in ((256, 128), (576, 256), (832, 256), (8192, 256), (256, 1024), (32, 6144), (1536, 6144))),
    *((n, k, 16) for n, k in ((24576, 6144), (154880, 6144), (5120, 5120), (64, 16384), (16, 32))),
    *(
        (n, k, 8)
        for n, k in ((256, 128), (2048, 2048), (6144, 2048), (512, 6144), (6144, 256), (3072, 6144), (19456, 6144))
    ),
)


@pytest.mark.parametrize("shape", (*SHAPES, *UNRECORDED), ids=str)
def test_tilings_keep_the_source_s_rules(shape: tuple[int, int, int]) -> None:
    """They fit the multiprocessor, ranks own groups of four outputs, no warp has more scales than lanes, and a packed
    weight finds its tiling again."""
    outputs, inputs, bits = shape
    cut = sm90_tiling.tiling(*shape)
    assert cut is not None and outputs % 16 == 0 and inputs * bits % 512 == 0
    assert cut.most_tiles in (2, 4, 8)
    for tiles in (tiles for tiles in sm90_tiling.TILES if tiles <= cut.most_tiles):
        made = cut.macros(tiles)
        barriers = 8 * sm90_tiling.WARPS * (made["SLOTS"] + made["X_SLOTS"])
        assert cut.shared_bytes(tiles) + barriers + 1024 + 64 <= sm90_tiling.SHARED_BYTES
        assert 1 <= made["PACED"] <= made["SLOTS"] and made["CHUNK"] * made["BATCH"] >= 1
        assert 0 <= made["HELD"] <= made["CHUNK"] * min(made["BATCH"], made["SLOTS"]), "held are the first of the ring"
    assert cut.strips * 16 % (4 * cut.ranks) == 0
    assert outputs < 512 or cut.strips * 16 % (8 * cut.ranks) == 0, "a rank has gates with their ups"
    blocks = inputs * bits // 512
    assert bits == 16 or -(-blocks // (cut.ranks * 8)) < 62
    packed = torch.empty(outputs // 16, blocks, 2, 32, 128 // bits, device="meta")
    assert sm90._cut_of(packed, bits) == cut


def test_shapes_that_no_tiling_fits_stay_as_they_are() -> None:
    weight, scales = torch.randn(72, 48).bfloat16(), torch.rand(1, 1)
    assert sm90.pack_bf16(weight) is weight
    other = torch.randn(256, 256)
    assert sm90.pack_bf16(other) is other, "float32 is the reference's"
    codes = weight.to(torch.float8_e4m3fn)
    assert sm90.pack_fp8(codes, scales)[0] is codes


@pytest.mark.parametrize("shape", [(2624, 6144, 16), (4096, 6144, 16), (2624, 6144, 8)], ids=str)
def test_the_source_compiles_without_spills(shape: tuple[int, int, int]) -> None:
    usage = sm90.kernel(sm90_tiling.tiling(*shape), 1)[0].usage("sm_90a")
    assert usage.spill_store_bytes == usage.spill_load_bytes == 0


def test_fused_forms_compile_without_spills() -> None:
    for shape in ((2048, 2048, 16), (6144, 2048, 8)):
        cut = sm90_tiling.tiling(*shape)
        made = sm90.normed_kernel(cut, 2)[0], sm90.best_kernel(cut, 2)[0]
        for kernel in made:
            usage = kernel.usage("sm_90a")
            assert usage.spill_store_bytes == usage.spill_load_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("tiles", sm90_tiling.TILES)
def test_every_tiling_compiles_without_spills(tiles: int) -> None:
    for shape in (*SHAPES, *UNRECORDED):
        cut = sm90_tiling.tiling(*shape)
        for swiglu in (0, 1) if shape[2] == 16 and cut.strips * 2 % cut.ranks == 0 else (0,):
            if tiles <= cut.most_tiles:
                usage = sm90.kernel(cut, tiles, swiglu)[0].usage("sm_90a")
                assert usage.spill_store_bytes == usage.spill_load_bytes == 0, (shape, swiglu)


#: Forms for more rows: one and two halves, one rank and several, slots that a slice has not enough K for.
MORE = (
    *(
        (n, k, bits)
        for n, k in ((2784, 6144), (2048, 2048), (6144, 2048), (512, 6144), (6144, 256))
        for bits in (16, 8)
    ),
    *(
        (n, k, bits)
        for n, k in ((256, 6144), (832, 256), (3072, 6144), (6144, 12288), (16384, 2048))
        for bits in (16, 8)
    ),
    *((n, k, 8) for n, k in ((19360, 6144), (5120, 5120), (32, 6144))),
)


@pytest.mark.parametrize("shape", (*SHAPES, *UNRECORDED), ids=str)
def test_forms_for_more_rows_keep_the_source_s_rules(shape: tuple[int, int, int]) -> None:
    """They fit the multiprocessor, every rank has K, and blocks run at once where the rule may say so."""
    outputs, inputs, bits = shape
    if sm90_many.rows_served(*shape) == (1, 0):
        assert outputs * inputs > 4096 * 6144 or inputs * bits % 1024
        return
    cut, steps = sm90_many.form(*shape), inputs * bits // 1024
    assert 1 <= cut.ranks <= min(8, steps)
    blocks = -(-outputs // (64 * cut.halves)) * cut.ranks
    assert blocks <= 128 * cut.resident or (bits == 8 and outputs > 16384 and cut.ranks == 1)
    for tokens in sm90_many.WIDTHS:
        made = cut.macros(tokens, bits, steps)
        assert 1 <= made["PACED"] <= made["SLOTS"] <= 8 and (made["SLOTS"] > 1 or steps == cut.ranks)
        assert (cut.shared_bytes(tokens, bits, steps) + 2048) * cut.resident <= 228 * 1024


def test_which_rows_are_multiplied_how() -> None:
    """33 to 128 where that was faster when it was measured; never up to 16, whose bits depend on nothing."""
    for shape in (*SHAPES, *UNRECORDED):
        assert not any(sm90_many.serves(rows, *shape) for rows in (0, 1, 16, 32, 129)), shape
    assert [sm90_many.serves(rows, 2784, 6144, 16) for rows in (32, 33, 96, 97)] == [False, True, True, False]
    assert [sm90_many.serves(rows, 6144, 1024, 16) for rows in (36, 64, 65)] == [True, True, False]
    assert [sm90_many.serves(rows, 256, 6144, 16) for rows in (33, 64, 65)] == [False, False, True]
    assert [sm90_many.serves(rows, 6144, 12288, 16) for rows in (48, 49)] == [True, False]
    assert sm90_many.serves(128, 2048, 2048, 16) and not sm90_many.serves(64, 19360, 6144, 16)
    assert all(sm90_many.serves(rows, 19360, 6144, 8) for rows in (33, 96, 128))
    assert not sm90_many.serves(64, 72, 64, 16) and not sm90_many.serves(64, 576, 320, 8), "whole strips and slots"


@pytest.mark.parametrize(("shape", "tokens"), [((2784, 6144), 64), ((6144, 2048), 128)], ids=str)
def test_forms_for_more_rows_compile_without_spills(shape: tuple[int, int], tokens: int) -> None:
    for bits in (16, 8):
        made, _ = sm90_many.kernel(sm90_many.form(*shape, bits), tokens, bits, shape[1] * bits // 1024)
        usage = made.usage("sm_90a")
        assert usage.spill_store_bytes == usage.spill_load_bytes == 0, bits


@pytest.mark.full
def test_every_form_for_more_rows_compiles_without_spills() -> None:
    for outputs, inputs, bits in (*SHAPES, *UNRECORDED):
        for tokens in sm90_many.WIDTHS if sm90_many.rows_served(outputs, inputs, bits)[1] else ():
            cut, steps = sm90_many.form(outputs, inputs, bits), inputs * bits // 1024
            usage = sm90_many.kernel(cut, tokens, bits, steps)[0].usage("sm_90a")
            assert usage.spill_store_bytes == usage.spill_load_bytes == 0, (outputs, inputs, bits, tokens)
            assert usage.registers * 32 * (4 * cut.halves + 2) * cut.resident <= 65536, (outputs, inputs, bits, tokens)


def implementation(op):
    implemented("sm90")
    return op.implementations["sm90"]


class Product:
    """A weight in one format, packed; its exact values; and the plain product that is the measure of error."""

    def __init__(self, outputs: int, inputs: int, bits: int) -> None:
        generator = torch.Generator("cuda").manual_seed(outputs + inputs)
        self.draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda")
        self.op = implementation(linear_bf16 if bits == 16 else linear_fp8_block)
        assert self.op.pack is not None
        if bits == 16:
            stored = ((self.draw(outputs, inputs) * inputs**-0.5).bfloat16(),)
            exact = stored[0].double()
        else:
            scales = self.draw(-(-outputs // 128), -(-inputs // 128)).abs() * 0.03 + 0.01
            stored = (self.draw(outputs, inputs).to(torch.float8_e4m3fn), scales)
            exact = dequantize_fp8_block(*stored).double()
        self.exact, self.plain = exact, exact.bfloat16()
        packed = self.op.pack(*stored)
        self.weight = packed if isinstance(packed, tuple) else (packed,)
        self.outputs, self.inputs, self.stored = outputs, inputs, stored
        cut = sm90_tiling.tiling(outputs, inputs, bits)
        most = 0 if cut is None else cut.most_rows
        self.many = [rows for rows in range(1, 200) if sm90_many.serves(rows, outputs, inputs, bits)]
        self.most_rows = min(most, self.many[0] - 1) if self.many else most

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.op.run(x, *self.weight, residual)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """x between rows of NaN, as a padded buffer holds it, and a residual."""
        padded = torch.full((count + 9, self.inputs), float("nan"), device="cuda", dtype=torch.bfloat16)
        padded[1 : count + 1] = self.draw(count, self.inputs).bfloat16()
        return padded[1 : count + 1], self.draw(count, self.outputs).bfloat16()

    def check(self, x: Tensor, residual: Tensor | None) -> None:
        """Error against float64 at most twice that of the plain bfloat16 product."""
        added = 0.0 if residual is None else residual
        exact = x.double() @ self.exact.t() + added
        plain = functional.linear(x, self.plain) + added
        error, allowed = (float((y.double() - exact).norm() / exact.norm()) for y in (self(x, residual), plain))
        assert error <= 2 * allowed, f"error {error:.2e}, plain bfloat16 has {allowed:.2e}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", (*SHAPES, *UNRECORDED), ids=str)
def test_error_and_bits_of_every_shape(shape: tuple[int, int, int], uninitialised_is_nan: None) -> None:
    """Error at 1 to 96 rows; a row's bits are the same alone and at every place, for as many rows as the kernel takes; repeated
    calls agree."""
    product = Product(*shape)
    x, residual = product.rows(96)
    most = product.most_rows
    alone = torch.cat([product(x[row : row + 1], residual[row : row + 1]) for row in range(most)])
    for count in (1, 6, 8, 16, 17, 24, most, 96):
        some, added = x[:count], residual[:count]
        product.check(some, added)
        product.check(some, None)
        assert count > most or torch.equal(product(some, added), alone[:count]), count
        assert torch.equal(product(some, added), product(some, added)), count
    order = torch.arange(most - 1, -1, -1, device="cuda")
    assert torch.equal(product(x[order], residual[order]), alone[order])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", MORE, ids=str)
def test_error_and_bits_of_more_rows(shape: tuple[int, int, int], uninitialised_is_nan: None) -> None:
    """Error at 33 to 128 rows; a row's bits are the same at every place and in any company of so many; repeated calls agree."""
    product = Product(*shape)
    x, residual = product.rows(product.many[-1])
    whole = product(x, residual)
    for count in (count for count in (33, 36, 48, 49, 64, 65, 96, 97, 100, 128) if count in product.many):
        some, added = x[:count], residual[:count]
        product.check(some, added)
        product.check(some, None)
        assert torch.equal(product(some, added), whole[:count]), count
        assert all(torch.equal(product(some, added), whole[:count]) for _ in range(3)), count
    order = torch.arange(len(x) - 1, -1, -1, device="cuda")
    assert torch.equal(product(x[order], residual[order]), whole[order])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [shape for shape, recorded in sm90_tiling.RECORDED.items() if recorded.held], ids=str)
def test_weights_held_in_registers_change_no_bits(shape: tuple[int, int, int], uninitialised_is_nan: None) -> None:
    """As if they were read from shared memory when rows come."""
    product = Product(*shape)
    cut, kept = sm90_tiling.tiling(*shape), product.weight[0]
    assert cut is not None and isinstance(kept, sm90_packing.Kept)
    for count in (1, 6, 16):
        x, residual = product.rows(count)
        wide = cut.wide and replace(cut.wide, held=0)
        read = sm90.Packed(replace(cut, held=0, wide=wide), kept.packed, *product.weight[1:])
        assert torch.equal(product(x, residual), sm90.multiply(read, x, residual)), count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "shape", [(512, 256), (512, 6144), (3072, 6144), (4096, 6144), (1536, 6144), (24576, 6144)], ids=str
)
def test_a_gated_product_has_the_bits_of_two_launches(shape: tuple[int, int], uninitialised_is_nan: None) -> None:
    product, gated = Product(*shape, 16), implementation(linear_swiglu)
    assert gated.pack is not None
    packed = gated.pack(product.plain)
    x, _ = product.rows(96)
    for count in (1, 6, 8, 16, 24, 32):
        gate, up = product(x[:count]).float().chunk(2, dim=-1)
        expected = functional.silu(gate) * up
        found = gated.run(x[:count], packed)
        assert torch.equal(found, gated.run(x[:count], packed))
        # The exponential is the hardware's: one unit in the last place of bfloat16 at most.
        assert bool(((found.float() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-30).all()), count
    many = product.draw(200, shape[1]).bfloat16()
    for count in (36, 64, 65, 128, 200):
        found = gated.run(many[:count], packed)
        assert torch.equal(found, gated.run(many[:count], packed)), count
        gate, up = functional.linear(many[:count], product.plain).float().chunk(2, dim=-1)
        assert torch.allclose(found.float(), functional.silu(gate) * up, rtol=2e-2, atol=2e-2), count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2048, 2048, 16), (2048, 2048, 8), (6144, 2048, 8), (576, 256, 8)], ids=str)
def test_rows_are_normed_on_the_way_in(shape: tuple[int, int, int], uninitialised_is_nan: None) -> None:
    product = Product(*shape)
    op = implementation(linear_bf16_normed if shape[2] == 16 else linear_fp8_block_normed)
    norm, x = (1 + 0.2 * product.draw(shape[1])).bfloat16(), (3 * product.draw(20, shape[1])).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    alone = torch.cat([op.run(x[row : row + 1], norm, 1e-5, *product.weight) for row in range(16)])
    for count in (1, 6, 8, 16, 20):
        found, expected = op.run(x[:count], norm, 1e-5, *product.weight), exact[:count] @ product.exact.t()
        plain = functional.linear(rms_norm.reference(x[:count], norm, 1e-5), product.plain)
        error, allowed = (float((y.double() - expected).norm()) for y in (found, plain))
        assert error <= 2 * allowed
        assert count > 16 or torch.equal(found, alone[:count])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(19360, 6144, 16), (19360, 6144, 8), (8192, 256, 16), (256, 6144, 16)], ids=str)
def test_the_best_output_is_that_of_the_product(shape: tuple[int, int, int], uninitialised_is_nan: None) -> None:
    """As the product itself has it, ties to the lowest; padding never; parts of a vocabulary agree with the whole by their keys;
    a launch leaves nothing behind for the next one, whatever the number of rows."""
    product = Product(*shape)
    implemented("sm90")
    importlib.import_module("legato.ops.gemm.argmax_sm90")
    best = (linear_bf16_best if shape[2] == 16 else linear_fp8_block_best).implementations["argmax_sm90"]
    outputs, width = product.outputs, product.outputs - 7
    x, _ = product.rows(20)
    for count in (16, 1, 6, 8, 9, 16, 20, 1):
        logits = product(x[:count])
        for _ in range(3):
            tokens, keys = best.run(x[:count], *product.weight, 100, width)
            assert torch.equal(tokens, logits[:, :width].argmax(-1) + 100), count
            assert torch.equal(token_of(keys), tokens)
    zero = torch.zeros(3, product.inputs, device="cuda", dtype=torch.bfloat16)
    assert best.run(zero, *product.weight, 5, width)[0].tolist() == [5, 5, 5], "equal logits, of either sign of zero"
    assert best.pack is not None
    half = outputs // 256 * 128
    parts = [tuple(part[:half] if part.shape[0] == outputs else part[: half // 128] for part in product.stored)]
    parts.append(tuple(part[half:] if part.shape[0] == outputs else part[half // 128 :] for part in product.stored))
    keys = [
        best.run(
            x[:6], *(packed if isinstance(packed := best.pack(*part), tuple) else (packed,)), first, part[0].shape[0]
        )[1]
        for part, first in zip(parts, (0, half), strict=True)
    ]
    whole = product(x[:6])
    top = whole.gather(1, token_of(torch.stack(keys).amax(0))[:, None])[:, 0]
    assert torch.allclose(top.float(), whole.float().amax(-1), rtol=2.0**-6), (
        "parts are cut otherwise: sums may round apart"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2784, 6144), (576, 320), (72, 64)], ids=str)
def test_codes_are_widened_as_the_reference_does(shape: tuple[int, int], uninitialised_is_nan: None) -> None:
    product = Product(*shape, 8)
    assert torch.equal(sm90.widened(*product.stored), product.plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [6, 48, 128])
def test_launches_that_overlap_wait_for_one_another(rows: int) -> None:
    """A chain in a graph, where every product reads what the one before wrote, gives the bits of the same calls with a
    synchronisation after each."""
    products = [Product(2048, 2048, 16), Product(6144, 2048, 16), Product(512, 6144, 16), Product(2048, 512, 16)]

    def chain(pause) -> Tensor:
        x = start
        for _ in range(10):
            for product in products:
                x = product(x)
                pause()
        return x

    start = products[0].draw(rows, 2048).bfloat16()
    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2048, 2048, 16), (16384, 2048, 8), (576, 320, 16), (72, 320, 8)], ids=str)
def test_everything_else_is_handed_on(shape: tuple[int, int, int]) -> None:
    """More rows than launches follow one another for, float32 rows, rows in odd places, weights that no tiling fits, no
    rows."""
    product = Product(*shape)
    product.check(*product.rows(product.most_rows + 1))
    product.check(*product.rows(6))
    x, residual = product.rows(6)
    # The library may go another way about rows that lie otherwise.
    agree = torch.equal if product.most_rows else partial(torch.allclose, rtol=2.0**-6, atol=2.0**-6)
    assert agree(product(x.repeat(1, 2)[:, : x.shape[1]], residual), product(x, residual))
    shifted = torch.empty(6, product.inputs + 1, device="cuda", dtype=torch.bfloat16)[:, 1:]
    shifted.copy_(x)
    assert agree(product(shifted, residual), product(x, residual))
    exact = product(x.float())
    assert exact.dtype is torch.float32
    assert torch.allclose(exact.double(), x.double() @ product.exact.t(), rtol=1e-4, atol=1e-2)
    assert product(x[:0]).shape == (0, product.outputs)
