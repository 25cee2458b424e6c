"""The best output of each row of a product, for a head of which nothing else is wanted: greedy tokens without logits.

Owns these products; keys are those of `greedy_keys`, by which ranks that share a vocabulary compare their bests. Knows no
request. Called by `legato.quant`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.case import EXACT, Case, Draw, Where
from legato.ops.gemm.dequantize import dequantize_fp8_block
from legato.ops.gemm.stored import fp8_weight
from legato.ops.invariant import matmul, pack_columns
from legato.ops.op import Op, op
from legato.ops.sample.ranks import greedy_keys, token_of


@op(reference_ok=True, pack=pack_columns)
def linear_bf16_best(x: Tensor, weight: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """The index of the highest of x @ weight.T in each row, ties to the lowest, without writing the product.

    x [T, K], weight [N, K] bfloat16 or float32, as stored or as `linear_bf16_best.pack` made it; only the first `width` outputs
    count (the others are padding), and they are numbered from `first` on. Outputs are compared as they would be written, in x's
    dtype.
    -> tokens [T] int64, and keys [T] int64: `greedy_keys` of the outputs.
    """
    return best_of(matmul(x, weight).to(x.dtype), first, width)


@op(reference_ok=True)
def linear_fp8_block_best(
    x: Tensor, weight: Tensor, scale_inv: Tensor, first: int, width: int
) -> tuple[Tensor, Tensor]:
    """`linear_bf16_best` with a weight stored as for `linear_fp8_block`."""
    return best_of(matmul(x, dequantize_fp8_block(weight, scale_inv)).to(x.dtype), first, width)


def best_of(logits: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Tokens and keys of logits [T, N] that are there."""
    keys = greedy_keys.reference(logits[:, :width], first)
    return token_of(keys), keys


def _case(linear: Op[..., Any], rows: int, shape: tuple[int, int], dtype: torch.dtype, on: Where) -> Case:
    """A head whose last outputs are padding, numbered as a later rank's are. Of a key only the token is looked at: values may
    round to neighbours."""
    outputs, inputs = shape
    is_fp8 = linear.name == "linear_fp8_block_best"

    def make(draw: Draw) -> tuple[Any, ...]:
        x = draw.normal(rows, inputs, dtype=dtype)
        stored = fp8_weight(draw, outputs, inputs) if is_fp8 else (draw.normal(outputs, inputs, dtype=dtype),)
        # One output for each row that no rounding brings down.
        stored[0].view(torch.uint8)[draw.distinct(rows, outputs - 5).long()] = x.to(stored[0].dtype).view(torch.uint8)
        return x, *stored, 3 * outputs, outputs - 5

    weights = (1, 2) if is_fp8 else (1,)
    return Case(
        linear,
        f"{linear.name} rows={rows} n={outputs} k={inputs} {str(dtype)[6:]}",
        make,
        EXACT,
        weights=weights,
        bytes=outputs * inputs * (1 if is_fp8 else dtype.itemsize) + rows * inputs * dtype.itemsize,
        flops=2 * rows * outputs * inputs,
        on=on,
        defined=lambda _, made: (made[0], token_of(made[1])),
    )


_BEST = (linear_bf16_best, linear_fp8_block_best)
BEST_CASES = (
    *(_case(linear, rows, (576, 256), torch.float32, "any") for linear in _BEST for rows in (1, 6)),
    *(_case(linear, 6, (512, 384), torch.bfloat16, "any") for linear in _BEST),
    *(_case(linear, rows, (19360, 6144), torch.bfloat16, "gpu") for linear in _BEST for rows in (1, 6, 16)),
)
