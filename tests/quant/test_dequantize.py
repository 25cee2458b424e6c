"""Every format, element by element, against scalar references: equal bits, not nearly equal numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from legato.quant import Format, Weight, build, quantize_fp8_block, quantize_int4, quantize_nvfp4
from legato.quant.int4 import from_compressed_tensors, from_w4afp8
from legato.quant.nvfp4 import Nvfp4Weight, round_e2m1
from legato.quant.stored import spell
from tests import scalar

LAYOUTS = {
    Format.FP8_BLOCK: ("fp8", quantize_fp8_block),
    Format.NVFP4: ("nvfp4", quantize_nvfp4),
    Format.INT4_PACKED: ("int4-packed", quantize_int4),
    Format.INT4_NIBBLES: ("int4-nibbles", quantize_int4),
}


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed values, so that blocks differ in scale and some codes saturate."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as bit patterns: tells -0.0 from 0.0."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def random_parts(stored: Format, rows: int, columns: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Parts filled with arbitrary codes and finite scales: what no quantiser of ours would write."""
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) + 0.01

    if stored is Format.FP8_BLOCK:
        weight = codes(rows, columns)
        weight[(weight & 0x7F) == 0x7F] = 0x3A
        scale = scales(-(-rows // 128), -(-columns // 128))
        return {"weight": weight.view(torch.float8_e4m3fn), "weight_scale_inv": scale}
    if stored is Format.NVFP4:
        scale = (codes(rows, columns // 16) & 0x7F).clamp(max=0x7E)
        weight_scale = scale.view(torch.float8_e4m3fn)
        return {"weight": codes(rows, columns // 2), "weight_scale": weight_scale, "weight_scale_2": scales()}
    scale = scales(rows, columns // 128)
    if stored is Format.INT4_PACKED:
        packed = codes(rows, columns // 2).view(torch.int32)
        shape = torch.tensor([rows, columns])
        return {"weight_packed": packed, "weight_scale": scale.bfloat16(), "weight_shape": shape}
    return {"weight": codes(rows, columns // 2).view(torch.int8), "weight_scale_inv": scale}


@pytest.mark.parametrize("shape", [(128, 256), (5, 128), (200, 384)], ids=str)
@pytest.mark.parametrize("stored", LAYOUTS, ids=lambda stored: stored.value)
def test_arbitrary_codes_match_the_scalar_reference(stored: Format, shape: tuple[int, int]) -> None:
    parts = random_parts(stored, *shape)
    expected = scalar.dequantize_parts(parts, LAYOUTS[stored][0])
    assert same_bits(build(stored, parts).dequantize(torch.float32), expected)


@pytest.mark.parametrize("stored", LAYOUTS, ids=lambda stored: stored.value)
def test_quantised_weights_match_the_scalar_reference(stored: Format) -> None:
    kind, quantize = LAYOUTS[stored]
    weight = quantize(random(192, 256))
    assert same_bits(weight.dequantize(torch.float32), scalar.dequantize_parts(spell(weight, stored), kind))


@pytest.mark.parametrize("stored", LAYOUTS, ids=lambda stored: stored.value)
def test_spelling_and_building_are_inverse(stored: Format) -> None:
    weight = LAYOUTS[stored][1](random(64, 128))
    again = build(stored, spell(weight, stored))
    assert same_bits(again.dequantize(torch.float32), weight.dequantize(torch.float32))
    assert (again.out_features, again.in_features, again.nbytes) == (64, 128, weight.nbytes)


@pytest.mark.parametrize("rows", [576, 127, 129, 1])
def test_fp8_partial_blocks(rows: int) -> None:
    """576 rows (kv_a_proj of the release) end in half a block, and so do any columns."""
    weight = quantize_fp8_block(random(rows, 200))
    assert weight.scale_inv.shape == (-(-rows // 128), 2)
    assert same_bits(weight.dequantize(torch.float32), scalar.fp8_block(weight.weight, weight.scale_inv))
    assert (
        float((weight.dequantize(torch.float32) - random(rows, 200)).abs().max() / random(rows, 200).abs().max()) < 0.04
    )


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None]
    values = codes.view(torch.float8_e4m3fn).float()[0]
    for code in range(256):
        expected = scalar.e4m3(code)
        assert float(values[code]) == expected or (code & 0x7F == 0x7F and bool(values[code].isnan()))


def test_every_nibble_low_half_first() -> None:
    packed = torch.tensor(
        [[low | (high << 4) for low, high in itertools.product(range(16), repeat=2)]], dtype=torch.uint8
    )
    scale = torch.ones(1, 32).to(torch.float8_e4m3fn)
    values = Nvfp4Weight(packed, scale, torch.ones(1)).dequantize(torch.float32)[0].tolist()
    pairs = [scalar.e2m1(nibble) for pair in itertools.product(range(16), repeat=2) for nibble in pair]
    assert values == pairs
    swapped = Nvfp4Weight((packed >> 4) | (packed << 4), scale, torch.ones(1)).dequantize(torch.float32)[0].tolist()
    assert swapped != pairs, "the order of nibbles does not show in this test"


def test_int4_layouts_hold_the_same_numbers() -> None:
    """Column c of both layouts, written nibble by nibble."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(-8, 8, (3, 256), generator=generator).tolist()
    words = [[sum((row[8 * w + i] + 8) << (4 * i) for i in range(8)) for w in range(32)] for row in q]
    packed = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    octets = [[(row[2 * b] & 15) | ((row[2 * b + 1] & 15) << 4) for b in range(128)] for row in q]
    nibbles = torch.tensor(octets, dtype=torch.uint8).view(torch.int8)
    scale = torch.tensor([[0.5, 2.0]] * 3)
    expected = torch.tensor(q, dtype=torch.float32) * scale.repeat_interleave(128, 1)
    assert torch.equal(from_compressed_tensors(packed, scale).dequantize(torch.float32), expected)
    assert torch.equal(from_w4afp8(nibbles, scale).dequantize(torch.float32), expected)


def test_e2m1_rounding_is_to_nearest_even() -> None:
    """Against a search over all codes, at every tie and beside it."""
    grid = [scalar.e2m1(code) for code in range(8)]
    points = [m / 64 for m in range(7 * 64)] + [0.25 + 2.0**-20, 5.0 - 2.0**-20, 100.0]
    for point in points:
        best = min(range(8), key=lambda code: (abs(grid[code] - point), code % 2))
        assert int(round_e2m1(torch.tensor(point))) == best, point
        assert int(round_e2m1(torch.tensor(-point))) == best | 8


def test_quantisers_follow_their_conventions() -> None:
    w = random(130, 256)
    fp8 = quantize_fp8_block(w)
    assert float(fp8.scale_inv[0, 0]) == float(w[:128, :128].abs().max() / 448)
    nvfp4 = quantize_nvfp4(w)
    assert float(nvfp4.scale_2[0]) == float(w.abs().max() / (6 * 448))
    assert float(nvfp4.scale.float().max()) == 448.0
    int4 = quantize_int4(w)
    assert float(int4.scale[0, 1]) == float((w[0, 128:].abs().max() / 7).bfloat16())
    for weight, bound in ((fp8, 0.04), (nvfp4, 0.15), (int4, 0.15)):
        error = (weight.dequantize(torch.float32) - w).norm() / w.norm()
        assert 0 < float(error) < bound


@pytest.mark.parametrize("quantize", [quantize_fp8_block, quantize_nvfp4, quantize_int4])
def test_zeros_and_tiny_values_survive(quantize) -> None:
    zeros = quantize(torch.zeros(128, 128))
    assert zeros.fault() is None
    assert not zeros.dequantize(torch.float32).any()
    mixed = random(128, 256)
    mixed[:, :128] = 0
    mixed[0, 200] = 1e-30
    weight = quantize(mixed)
    assert weight.fault() is None
    assert not weight.dequantize(torch.float32)[:, :128].any()


def test_dequantize_rounds_once_to_bf16() -> None:
    weight: Weight = quantize_nvfp4(random(16, 64))
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize(torch.float32).bfloat16())
