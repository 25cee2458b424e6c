"""Dequantisation bit for bit against scalar references, with leading dimensions, partial blocks and every code."""

import pytest
import torch
from torch import Tensor

from legato.ops.cache.layout import e4m3_to_float
from legato.ops.case import Draw
from legato.ops.gemm.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_nvfp4
from legato.ops.gemm.stored import fp8_weight, int4_weight, nvfp4_weight
from tests import scalar


def draw(seed: int = 0) -> Draw:
    return Draw(torch.Generator().manual_seed(seed), torch.device("cpu"))


def equal_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal as bit patterns (which tells -0.0 from 0.0); any NaN equals any NaN."""
    both_nan = found.isnan() & expected.isnan()
    return found.shape == expected.shape and bool(
        ((found.view(torch.int32) == expected.view(torch.int32)) | both_nan).all()
    )


# 576 rows make the half block of a fused projection; 320 columns half a block the other way.
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (8, 128), (192, 320), (129, 16)])
def test_fp8_block(rows: int, columns: int) -> None:
    weight, scale = fp8_weight(draw(rows), rows, columns)
    assert equal_bits(dequantize_fp8_block(weight, scale), scalar.fp8_block(weight, scale))


def test_fp8_every_code_and_odd_scales() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    for scale in (1.0, 0.1, 3.0e-38, 1.7e30, -2.5):
        scales = torch.full((1, 1), scale)
        assert equal_bits(dequantize_fp8_block(weight, scales), scalar.fp8_block(weight, scales))


def test_the_quick_conversion_of_codes_is_the_librarys() -> None:
    codes = torch.tensor([code for code in range(256) if code not in (127, 255)], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    assert equal_bits(e4m3_to_float(codes), codes.to(torch.float32))


def test_nvfp4_every_nibble_under_every_finite_scale() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes = [code for code in range(256) if code not in (127, 255)]
    for first in range(0, len(codes), 32):
        some = torch.tensor((codes[first : first + 32] * 2)[:32], dtype=torch.uint8)
        scale = some.view(2, 16).view(torch.float8_e4m3fn)
        for top in (1.0, 0.0003217, 7.0e-39):
            expected = scalar.nvfp4(packed, scale, torch.tensor(top))
            assert equal_bits(dequantize_nvfp4(packed, scale, torch.tensor(top)), expected)


def test_nvfp4_low_nibble_is_the_even_column() -> None:
    packed = torch.tensor([[0x72] + [0] * 7], dtype=torch.uint8)
    weight = dequantize_nvfp4(packed, torch.ones(1, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    assert weight[0, :2].tolist() == [1.0, 6.0]


def test_nvfp4_global_scales_per_row_and_per_expert() -> None:
    source = draw()
    packed, scale = nvfp4_weight(source, 3, 8, 32)
    per_row, per_expert = source.uniform(3, 8), source.uniform(3)
    by_row, by_expert = dequantize_nvfp4(packed, scale, per_row), dequantize_nvfp4(packed, scale, per_expert)
    for expert in range(3):
        assert equal_bits(by_expert[expert], scalar.nvfp4(packed[expert], scale[expert], per_expert[expert]))
        for row in range(8):
            one = slice(row, row + 1)
            expected = scalar.nvfp4(packed[expert, one], scale[expert, one], per_row[expert, row])
            assert equal_bits(by_row[expert, one], expected)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_int4(scale_dtype: torch.dtype) -> None:
    packed, scale = int4_weight(draw(), 2, 4, 256)
    packed[0, 0, :128] = torch.arange(128, dtype=torch.uint8)
    packed[0, 1, :128] = torch.arange(128, 256).to(torch.uint8)
    scale = scale.to(scale_dtype)
    found = dequantize_int4(packed, scale)
    for matrix in range(2):
        for row in range(4):
            for column in range(256):
                byte = int(packed[matrix, row, column // 2])
                code = scalar.signed4(byte >> 4 if column % 2 else byte & 15)
                expected = scalar.f32(code * float(scale[matrix, row, column // 128]))
                assert float(found[matrix, row, column]) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda: dequantize_fp8_block(torch.zeros(576, 256).to(torch.float8_e4m3fn), torch.ones(4, 2)),
        lambda: dequantize_nvfp4(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 3), torch.tensor(1.0)),
        lambda: dequantize_nvfp4(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 4), torch.ones(3)),
        lambda: dequantize_int4(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)),
        lambda: dequantize_int4(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 0)),
    ],
)
def test_scales_that_do_not_fit_are_refused(call) -> None:
    with pytest.raises(ValueError, match="expected"):
        call()
