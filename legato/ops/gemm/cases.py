"""The cases of the products: small ones, and those of GLM-5.2's dense weights at full width and on ranks of 2, 4 and 8.

Owns shapes, tolerances, and what a product must read. Imported by `gemm`, behind its ops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from legato.ops.case import BFLOAT16, Case, Draw, Tolerance, Where
from legato.ops.gemm import (
    linear_bf16,
    linear_bf16_normed,
    linear_draft,
    linear_fp8_block,
    linear_fp8_block_normed,
    linear_heads,
    linear_int4,
    linear_nvfp4,
    linear_swiglu,
)
from legato.ops.gemm.best import BEST_CASES
from legato.ops.gemm.stored import fp8_weight, int4_weight, nvfp4_weight
from legato.ops.op import Op

_BY_LIBRARY = Tolerance(2.0**-6, 2.0**-5)

#: Which arguments are the stored weight, where it is more than one tensor.
_STORED = {"linear_fp8_block": (1, 2), "linear_nvfp4": (1, 2, 3), "linear_int4": (1, 2)}


def _weight_case(linear: Op[..., Tensor], rows: int, shape: tuple[int, int], dtype: torch.dtype, on: Where) -> Case:
    """One product with a weight [N, K] in the format of `linear`."""
    outputs, inputs = shape

    def make(draw: Draw) -> tuple[Any, ...]:
        x = draw.normal(rows, inputs, dtype=dtype)
        match linear.name:
            case "linear_fp8_block":
                weight = fp8_weight(draw, outputs, inputs)
            case "linear_nvfp4":
                per_row = draw.uniform(outputs, low=1e-4, high=4e-4)
                weight = (*nvfp4_weight(draw, outputs, inputs), per_row if rows > 1 else per_row[0])
            case "linear_int4":
                weight = int4_weight(draw, outputs, inputs)
            case _:
                weight = (draw.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5),)
        return (x, *weight)

    bits = {"linear_fp8_block": 8, "linear_nvfp4": 4.5, "linear_int4": 4.125}.get(linear.name, 8 * dtype.itemsize)
    return Case(
        linear,
        f"{linear.name} rows={rows} n={outputs} k={inputs} {str(dtype)[6:]}",
        make,
        # The library, which multiplies for many rows, splits K and rounds the parts.
        (BFLOAT16 if rows <= 64 else _BY_LIBRARY) if dtype == torch.bfloat16 else Tolerance(1e-5, 3e-5),
        weights=_STORED.get(linear.name, (1,)),
        bytes=int(outputs * inputs * bits / 8) + rows * (outputs + inputs) * dtype.itemsize,
        flops=2 * rows * outputs * inputs,
        on=on,
    )


def _added(case: Case) -> Case:
    """The same product with a residual."""

    def make(draw: Draw) -> tuple[Any, ...]:
        x, weight, *scales = case.make(draw)
        return (x, weight, *scales, draw.normal(x.shape[0], weight.shape[0], dtype=x.dtype))

    return replace(case, name=f"{case.name} residual", make=make)


def _normed_case(linear: Op[..., Tensor], rows: int, shape: tuple[int, int], dtype: torch.dtype, on: Where) -> Case:
    outputs, inputs = shape
    is_fp8 = linear.name == "linear_fp8_block_normed"

    def make(draw: Draw) -> tuple[Any, ...]:
        x, norm = draw.normal(rows, inputs, dtype=dtype, scale=3.0), 1 + draw.normal(inputs, dtype=dtype, scale=0.2)
        dense = (draw.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5),)
        return x, norm, 1e-5, *(fp8_weight(draw, outputs, inputs) if is_fp8 else dense)

    return Case(
        linear,
        f"{linear.name} rows={rows} n={outputs} k={inputs} {str(dtype)[6:]}",
        make,
        Tolerance(2.0**-6, 2.0**-6) if dtype == torch.bfloat16 else Tolerance(1e-5, 3e-5),
        weights=(3, 4) if is_fp8 else (3,),
        bytes=outputs * inputs * (1 if is_fp8 else dtype.itemsize) + rows * (outputs + inputs) * dtype.itemsize,
        flops=2 * rows * outputs * inputs,
        on=on,
    )


def _swiglu_case(rows: int, shape: tuple[int, int], dtype: torch.dtype, on: Where) -> Case:
    outputs, inputs = shape
    return Case(
        linear_swiglu,
        f"linear_swiglu rows={rows} n={outputs} k={inputs} {str(dtype)[6:]}",
        lambda draw: (
            draw.normal(rows, inputs, dtype=dtype),
            draw.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5),
        ),
        # A gate or an up that rounds to its neighbour moves the product by as much again.
        Tolerance(2.0**-6, 2.0**-7) if dtype == torch.bfloat16 else Tolerance(1e-5, 3e-5),
        weights=(1,),
        bytes=(outputs * inputs + rows * (outputs // 2 + inputs)) * dtype.itemsize,
        flops=2 * rows * outputs * inputs,
        on=on,
    )


def _heads_case(rows: int, heads: int, shape: tuple[int, int], dtype: torch.dtype) -> Case:
    outputs, inputs = shape
    return Case(
        linear_heads,
        f"linear_heads rows={rows} heads={heads} n={outputs} k={inputs} {str(dtype)[6:]}",
        lambda draw: (
            draw.normal(rows, heads, inputs, dtype=dtype),
            draw.normal(heads, inputs, outputs, dtype=dtype, scale=inputs**-0.5).transpose(1, 2),
        ),
        BFLOAT16 if dtype == torch.bfloat16 else Tolerance(1e-5, 3e-5),
        weights=(1,),
        bytes=(heads * outputs * inputs + rows * heads * (outputs + inputs)) * dtype.itemsize,
        flops=2 * rows * heads * outputs * inputs,
    )


#: [N, K] of GLM-5.2's dense weights: q_a with kv_a, q_b, o, the indexer's queries and keys, router, shared expert, dense
#: layers, the MTP layer's projection and the head; full width and, where they are sharded, a rank of 8.
_DENSE_SHAPES = (
    (2624, 6144),
    (16384, 2048),
    (2048, 2048),
    (6144, 16384),
    (6144, 2048),
    (4096, 2048),
    (128, 6144),
    (256, 6144),
    (4096, 6144),
    (512, 6144),
    (6144, 256),
    (24576, 6144),
    (3072, 6144),
    (6144, 12288),
    (6144, 1536),
    (19360, 6144),
    (2784, 6144),
)
#: What ranks of 2 and of 4 add: queries, output, shared expert, dense layers and head.
_RANK_SHAPES = (
    (8192, 2048),
    (6144, 8192),
    (2048, 6144),
    (6144, 1024),
    (12288, 6144),
    (6144, 6144),
    (77440, 6144),
    (6144, 4096),
    (1024, 6144),
    (6144, 512),
    (6144, 3072),
    (38720, 6144),
)
#: What batches of requests of several rows multiply with: a rank of 8, and full width.
_MANY_SHAPES = (
    (2784, 6144),
    (2048, 2048),
    (6144, 2048),
    (512, 6144),
    (6144, 256),
    (2624, 6144),
    (3072, 6144),
    (4096, 2048),
    (6144, 1536),
    (19360, 6144),
)
_NORMED = (linear_bf16_normed, linear_fp8_block_normed)
_FORMATS = (linear_bf16, linear_fp8_block, linear_nvfp4, linear_int4)
CASES = (
    *BEST_CASES,
    *(_weight_case(linear_draft, rows, (576, 256), torch.float32, "any") for rows in (1, 5)),
    *(_weight_case(linear_draft, rows, (19360, 6144), torch.bfloat16, "gpu") for rows in (1, 4)),
    *(_normed_case(linear, rows, (576, 256), torch.float32, "any") for linear in _NORMED for rows in (1, 9)),
    *(
        _normed_case(linear, rows, shape, torch.bfloat16, "gpu")
        for linear in _NORMED
        for shape in ((2048, 2048), (6144, 2048))
        for rows in (1, 6, 16)
    ),
    *(_normed_case(linear, 6, (512, 384), torch.bfloat16, "any") for linear in _NORMED),
    *(_swiglu_case(rows, (576, 256), torch.float32, "any") for rows in (1, 9)),
    _swiglu_case(6, (512, 384), torch.bfloat16, "any"),
    *(
        _swiglu_case(rows, shape, torch.bfloat16, "gpu")
        for shape in ((512, 256), (512, 6144), (3072, 6144), (4096, 6144), (24576, 6144))
        for rows in (1, 6, 16)
    ),
    *(_swiglu_case(rows, (512, 384), torch.bfloat16, "any") for rows in (40, 100)),
    *(
        _swiglu_case(rows, shape, torch.bfloat16, "gpu")
        for shape in ((512, 6144), (3072, 6144))
        for rows in (36, 64, 96)
    ),
    *(_weight_case(linear, rows, (576, 256), torch.float32, "any") for linear in _FORMATS for rows in (1, 37)),
    *(_added(_weight_case(linear, 6, (576, 256), torch.float32, "any")) for linear in _FORMATS),
    *(_added(_weight_case(linear, 6, (512, 384), torch.bfloat16, "any")) for linear in _FORMATS),
    # More rows, of a weight whose last outputs are no whole block.
    *(
        _added(_weight_case(linear, rows, (592, 640), torch.bfloat16, "any"))
        for linear in (linear_bf16, linear_fp8_block)
        for rows in (33, 64, 100)
    ),
    # Widths that no block divides: 320 = two and a half blocks of the FP8 scale, 72 columns of output.
    _weight_case(linear_bf16, 9, (72, 48), torch.float32, "any"),
    _weight_case(linear_fp8_block, 9, (72, 320), torch.float32, "any"),
    # GLM-5.2 at full width, and one rank of 8: every dense product of an iteration.
    *(_weight_case(linear_bf16, rows, shape, torch.bfloat16, "gpu") for shape in _DENSE_SHAPES for rows in (1, 6, 16)),
    *(_weight_case(linear_bf16, rows, shape, torch.bfloat16, "gpu") for shape in _RANK_SHAPES for rows in (1, 6, 16)),
    # A rank of 8 by rows: few tokens, prompts' ends, batches of requests of 6 rows.
    *(
        _weight_case(linear_bf16, rows, shape, torch.bfloat16, "gpu")
        for shape in ((2784, 6144), (2048, 2048), (6144, 2048), (512, 6144), (6144, 256))
        for rows in (2, 4, 8, 12, 24, 32, 48, 64, 96)
    ),
    *(
        _weight_case(linear_bf16, rows, shape, torch.bfloat16, "gpu")
        for shape in _MANY_SHAPES
        for rows in (33, 36, 40, 48, 64, 65, 96, 100, 128)
        if rows not in (48, 64, 96) or shape in ((2624, 6144), (3072, 6144), (4096, 2048), (6144, 1536), (19360, 6144))
    ),
    *(
        _weight_case(linear_fp8_block, rows, shape, torch.bfloat16, "gpu")
        for shape in _MANY_SHAPES
        for rows in (33, 36, 40, 48, 64, 65, 96, 100, 128)
    ),
    # What is added to the residual stream.
    *(
        _added(_weight_case(linear, rows, shape, torch.bfloat16, "gpu"))
        for linear in (linear_bf16, linear_fp8_block)
        for shape in ((6144, 2048), (6144, 256), (6144, 1536), (6144, 12288))
        for rows in (6, 16)
    ),
    *(
        _added(_weight_case(linear, rows, (6144, 2048), torch.bfloat16, "gpu"))
        for linear in (linear_bf16, linear_fp8_block)
        for rows in (36, 64, 96)
    ),
    *(
        _weight_case(linear_fp8_block, rows, shape, torch.bfloat16, "gpu")
        for shape in (
            (2624, 6144),
            (16384, 2048),
            (6144, 16384),
            (24576, 6144),
            (4096, 6144),
            (2048, 2048),
            (6144, 2048),
            (512, 6144),
            (6144, 256),
            (3072, 6144),
            (6144, 1536),
            (2784, 6144),
            (4096, 2048),
            (6144, 12288),
            (19360, 6144),
            *(shape for shape in _RANK_SHAPES if shape[0] <= 12288),
        )
        for rows in (1, 6, 16)
    ),
    *(
        _weight_case(linear, rows, shape, torch.bfloat16, "gpu")
        for linear in (linear_nvfp4, linear_int4)
        for rows in (1, 6, 16)
        for shape in ((2624, 6144), (2048, 2048), (6144, 2048))
    ),
    *(_heads_case(rows, 4, shape, torch.float32) for rows in (1, 6, 9) for shape in ((512, 64), (64, 512))),
    *(_heads_case(6, 8, shape, torch.bfloat16) for shape in ((512, 192), (256, 512))),
)
