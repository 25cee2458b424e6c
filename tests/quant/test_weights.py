"""Weights and experts as the model sees them: joining keeps values, products agree with the dequantised twin, bad scales show."""

from __future__ import annotations

import pytest
import torch

from legato.quant import (
    DenseExperts,
    DenseWeight,
    Format,
    Fp8BlockWeight,
    Int4Weight,
    Nvfp4Weight,
    StackedWeight,
    Weight,
    collect,
    concatenate,
    quantize_fp8_block,
    quantize_int4,
    quantize_nvfp4,
)
from legato.quant.dense import Triple
from legato.quant.formats import column_multiple, parts, recognise, resident_bytes
from legato.quant.stored import stackable
from tests.quant.test_dequantize import random

QUANTIZERS = {
    Format.DENSE: DenseWeight,
    Format.FP8_BLOCK: quantize_fp8_block,
    Format.NVFP4: quantize_nvfp4,
    Format.INT4_NIBBLES: quantize_int4,
}
FORMATS = pytest.mark.parametrize("stored", QUANTIZERS, ids=lambda stored: stored.value)


@FORMATS
def test_concatenation_is_one_weight_with_the_same_values(stored: Format) -> None:
    parts_ = [QUANTIZERS[stored](random(rows, 256, seed=rows)) for rows in (256, 128, 72)]
    joined = concatenate(parts_)
    assert type(joined) is type(parts_[0])
    values = torch.cat([part.dequantize(torch.float32) for part in parts_])
    assert torch.equal(joined.dequantize(torch.float32), values)
    assert (joined.out_features, joined.in_features) == (456, 256)


def test_what_cannot_be_one_weight_is_stacked() -> None:
    unaligned = [quantize_fp8_block(random(48, 64)), quantize_fp8_block(random(48, 64, 1))]
    mixed = [quantize_nvfp4(random(48, 64)), DenseWeight(random(48, 64, 1))]
    for weights in (unaligned, mixed):
        joined = concatenate(weights)
        assert isinstance(joined, StackedWeight)
        x, residual = random(5, 64), random(5, 96)
        separate = torch.cat([weight.linear(x) for weight in weights], dim=1)
        assert torch.equal(joined.linear(x), separate)
        assert torch.allclose(joined.linear(x, residual), separate + residual, atol=1e-5)
        assert joined.nbytes == sum(weight.nbytes for weight in weights)
    with pytest.raises(ValueError, match="differ in width"):
        concatenate([DenseWeight(random(8, 16)), DenseWeight(random(8, 32))])


@FORMATS
def test_linear_is_the_product_with_the_dequantised_weight(stored: Format) -> None:
    weight, x = QUANTIZERS[stored](random(200, 256)), random(9, 256, seed=3)
    twin = DenseWeight(weight.dequantize(torch.float32))
    assert torch.allclose(weight.linear(x), twin.linear(x), rtol=1e-5, atol=1e-4)
    assert torch.allclose(weight.linear(x, random(9, 200)), twin.linear(x) + random(9, 200), rtol=1e-5, atol=1e-4)


def triples(stored: Format, num_experts: int = 4, width: int = 128, hidden: int = 256) -> list[Triple]:
    """Experts whose gate and up differ by 1.5 in magnitude, so that sharing one global scale would show."""
    quantize = QUANTIZERS[stored]
    return [
        (
            quantize(random(width, hidden, 3 * e)),
            quantize(1.5 * random(width, hidden, 3 * e + 1)),
            quantize(random(hidden, width, 3 * e + 2)),
        )
        for e in range(num_experts)
    ]


@FORMATS
def test_experts_hold_every_triple(stored: Format) -> None:
    source = triples(stored)
    experts = collect(stored, iter(source), 4, torch.float32, torch.device("cpu"))
    dense = experts.dequantize(torch.float32)
    assert isinstance(dense, DenseExperts)
    assert experts.num_experts == 4
    for e, (gate, up, down) in enumerate(source):
        assert torch.equal(dense.w13[e, :128], gate.dequantize(torch.float32))
        assert torch.equal(dense.w13[e, 128:], up.dequantize(torch.float32))
        assert torch.equal(dense.w2[e], down.dequantize(torch.float32))
    sizes = [resident_bytes(stored, 128, 256), resident_bytes(stored, 256, 128)]
    if stored is not Format.DENSE:
        assert experts.nbytes == 4 * (2 * sizes[0] + sizes[1])


@FORMATS
def test_moe_agrees_with_the_dequantised_experts(stored: Format) -> None:
    experts = collect(stored, iter(triples(stored)), 4, torch.float32, torch.device("cpu"))
    x = random(6, 256, seed=9) * 0.1
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 3], [-1, -1]])
    weights = torch.full((6, 2), 0.7)
    expected = experts.dequantize(torch.float32).moe(x, ids, weights)
    assert torch.allclose(experts.moe(x, ids, weights), expected, rtol=1e-4, atol=1e-3)
    assert not expected[5].any()
    assert expected[:5].abs().amax() > 0.1


def test_mixed_formats_become_dense_experts() -> None:
    mixed = [triples(Format.NVFP4)[0], triples(Format.DENSE)[1]]
    experts = DenseExperts.collect(iter(mixed), 2, torch.float32, torch.device("cpu"))
    assert torch.equal(experts.w13[0, :128], mixed[0][0].dequantize(torch.float32))
    assert torch.equal(experts.w2[1], mixed[1][2].dequantize(torch.float32))


def test_stackable() -> None:
    assert stackable([Format.NVFP4] * 3, 32)
    assert stackable([Format.INT4_PACKED, Format.INT4_NIBBLES], 128)
    assert stackable([Format.FP8_BLOCK], 256)
    assert not stackable([Format.FP8_BLOCK], 64)
    assert not stackable([Format.NVFP4, Format.DENSE], 128)


def broken(weight: Weight, value: float) -> Weight:
    """The weight with one scale replaced."""
    if isinstance(weight, Fp8BlockWeight):
        scale = weight.scale_inv.clone()
        scale[1, 0] = value
        return Fp8BlockWeight(weight.weight, scale)
    if isinstance(weight, Int4Weight):
        scale = weight.scale.clone()
        scale[3, 1] = value
        return Int4Weight(weight.packed, scale)
    assert isinstance(weight, Nvfp4Weight)
    return Nvfp4Weight(weight.packed, weight.scale, torch.full_like(weight.scale_2, value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("stored", [Format.FP8_BLOCK, Format.NVFP4, Format.INT4_NIBBLES], ids=lambda s: s.value)
def test_damaged_scales_are_found(stored: Format, value: float) -> None:
    weight = QUANTIZERS[stored](random(256, 256))
    assert weight.fault() is None
    found = broken(weight, value).fault()
    assert found is not None
    if stored is not Format.NVFP4:
        assert "[1, 0]" in found.found or "[3, 1]" in found.found


def test_damaged_block_scales_of_nvfp4_are_found() -> None:
    weight = quantize_nvfp4(random(32, 64))
    for code, word in ((0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative")):
        scale = weight.scale.view(torch.uint8).clone()
        scale[2, 3] = code
        found = Nvfp4Weight(weight.packed, scale.view(torch.float8_e4m3fn), weight.scale_2).fault()
        assert found is not None
        assert word in found.found
        assert "[2, 3]" in found.found


def test_formats_are_recognised_by_what_is_there() -> None:
    def entry(dtype: str) -> tuple[str, tuple[int, ...]]:
        return (dtype, (1, 1))

    assert recognise({}) is None
    assert recognise({"weight_scale": entry("F32")}) is None
    assert recognise({"weight": entry("BF16")}) is Format.DENSE
    assert recognise({"weight": entry("F8_E4M3")}) is Format.FP8_BLOCK
    assert recognise({"weight": entry("U8"), "weight_scale": entry("F8_E4M3")}) is Format.NVFP4
    assert recognise({"weight_packed": entry("I32"), "weight_scale": entry("BF16")}) is Format.INT4_PACKED
    assert recognise({"weight": entry("I8"), "weight_scale_inv": entry("F32")}) is Format.INT4_NIBBLES


def test_shapes_of_the_release() -> None:
    """The sizes that the public releases store for GLM-5.2."""
    gate = {part.suffix: part.shape for part in parts(Format.NVFP4, 2048, 6144, {})}
    assert gate["weight"] == (2048, 3072)
    assert gate["weight_scale"] == (2048, 384)
    down = {part.suffix: part.shape for part in parts(Format.NVFP4, 6144, 2048, {})}
    assert down["weight_scale"] == (6144, 128)
    kv_a = {part.suffix: part.shape for part in parts(Format.FP8_BLOCK, 576, 6144, {})}
    assert kv_a["weight_scale_inv"] == (5, 48)
    assert column_multiple(Format.INT4_PACKED) == 128
