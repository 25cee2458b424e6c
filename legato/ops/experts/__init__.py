"""The router's choice and the chosen experts' work.

Owns routing and the grouped expert product in each storage format. Knows nothing of the shared expert, which is a plain MLP of the
model. Called by `legato.model` (route) and `legato.quant` (the products).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from legato.ops.gemm.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_nvfp4
from legato.ops.invariant import ROW_BLOCK, block_matmul, column_blocks, map_elements, matmul, pad_rows
from legato.ops.op import op
from legato.ops.pointwise import swiglu

#: The weights of expert e in float32: (w13 [2F, D], w2 [D, F]).
ExpertWeights = Callable[[int], tuple[Tensor, Tensor]]


@op
def route(x: Tensor, weight: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose k experts per row and weigh them.

    s = sigmoid(weight @ x) in float32; the choice is the k largest of s + bias (bias only chooses); weights = s / (sum of the chosen s
    + 1e-20) * scale. x [T, D], weight [E, D], bias [E] float32, scale = routed_scaling_factor
    -> (ids [T, k] int32, weights [T, k] float32), best choice first, ties to the lowest id.
    Source: "noaux_tc" routing of arXiv:2412.19437 with one group.
    """
    gates = map_elements(torch.sigmoid, matmul(x, weight))
    ids = (gates + bias.to(torch.float32)).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = gates.gather(1, ids)
    return ids.to(torch.int32), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale


@op
def moe_bf16(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """sum over a of weights[t, a] * w2[e] @ swiglu(w13[e] @ x[t]) with e = ids[t, a]; the sum runs in the order of a, in float32.

    x [T, D], ids [T, A] int32 (negative: contributes nothing), weights [T, A] float32, w13 [E, 2F, D] (gate rows, then up rows) and
    w2 [E, D, F] bfloat16 or float32 -> [T, D] in x's dtype. Only experts that some row chose are computed.
    """
    return _moe(x, ids, weights, w2.shape[1], lambda expert: (w13[expert].to(torch.float32), w2[expert].to(torch.float32)))


@op
def moe_fp8_block(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale_inv: Tensor, w2: Tensor, w2_scale_inv: Tensor
) -> Tensor:
    """`moe_bf16` over experts stored as e4m3 with float32 scales per 128x128 block.

    w13 e4m3 [E, 2F, D], w13_scale_inv [E, ceil(2F/128), ceil(D/128)], w2 e4m3 [E, D, F], w2_scale_inv [E, ceil(D/128), ceil(F/128)].
    Gate and up are quantised as one matrix here; a loader whose F is no multiple of 128 must requantise. See `dequantize_fp8_block`.
    """

    def dequantized(expert: int) -> tuple[Tensor, Tensor]:
        return (
            dequantize_fp8_block(w13[expert], w13_scale_inv[expert]),
            dequantize_fp8_block(w2[expert], w2_scale_inv[expert]),
        )

    return _moe(x, ids, weights, w2.shape[1], dequantized)


@op
def moe_nvfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
) -> Tensor:
    """`moe_bf16` over experts stored as NVFP4; gate and up keep their own global scales.

    w13 uint8 [E, 2F, D/2], w13_scale e4m3 [E, 2F, D/16], w13_scale_2 float32 [E, 2] (gate, up), w2 uint8 [E, D, F/2],
    w2_scale e4m3 [E, D, F/16], w2_scale_2 float32 [E]. See `dequantize_nvfp4`.
    """
    half = w13.shape[1] // 2

    def dequantized(expert: int) -> tuple[Tensor, Tensor]:
        globals_13 = w13_scale_2[expert].repeat_interleave(half)
        return (
            dequantize_nvfp4(w13[expert], w13_scale[expert], globals_13),
            dequantize_nvfp4(w2[expert], w2_scale[expert], w2_scale_2[expert]),
        )

    return _moe(x, ids, weights, w2.shape[1], dequantized)


@op
def moe_int4(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> Tensor:
    """`moe_bf16` over experts stored as INT4 in groups of 128.

    w13 uint8 [E, 2F, D/2], w13_scale [E, 2F, D/128], w2 uint8 [E, D, F/2], w2_scale [E, D, F/128]. See `dequantize_int4`.
    """

    def dequantized(expert: int) -> tuple[Tensor, Tensor]:
        return dequantize_int4(w13[expert], w13_scale[expert]), dequantize_int4(w2[expert], w2_scale[expert])

    return _moe(x, ids, weights, w2.shape[1], dequantized)


def _moe(x: Tensor, ids: Tensor, weights: Tensor, width: int, expert_weights: ExpertWeights) -> Tensor:
    """Every pair (row, choice) is computed by its expert in a block of eight rows, then summed over the choices in order."""
    rows = x.to(torch.float32)
    pairs: dict[int, list[int]] = {}
    choices = ids.shape[1]
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        if expert >= 0:
            pairs.setdefault(expert, []).append(pair)
    # One more row than pairs: the zeros that masked choices point to.
    places = torch.full((ids.numel(),), 0, dtype=torch.int64)
    blocks = [rows.new_zeros(1, width)]
    filled = 1
    whole = pad_rows(rows) if x.shape[0] <= ROW_BLOCK else None
    for expert, members in sorted(pairs.items()):
        w13, w2 = expert_weights(expert)
        members_at = torch.tensor(members)
        token_rows = members_at // choices
        if whole is not None:
            # All rows fit one block: the expert computes them where they stand, and only its own are read.
            places[members_at] = filled + token_rows
            inputs = whole
        else:
            places[members_at] = filled + torch.arange(len(members))
            inputs = pad_rows(rows.index_select(0, token_rows.to(rows.device)))
        w13_blocks, w2_blocks = column_blocks(w13), column_blocks(w2)
        for block in inputs.split(ROW_BLOCK):
            blocks.append(block_matmul(swiglu.reference(block_matmul(block, w13_blocks)), w2_blocks))
            filled += ROW_BLOCK
    outputs = torch.cat(blocks).index_select(0, places.to(rows.device)).view(x.shape[0], choices, width)
    scaled = outputs * weights.unsqueeze(-1)
    total = scaled[:, 0]
    for choice in range(1, choices):
        total = total + scaled[:, choice]
    return total.to(x.dtype)
