"""The router's choice and the chosen experts' work.

Owns routing and the grouped expert product in each storage format, with a dense expert that every row takes where there
is one. Called by `legato.model` (route) and `legato.quant` (the products).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from legato.ops.gemm import linear_bf16, linear_fp8_block
from legato.ops.gemm.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_nvfp4
from legato.ops.invariant import (
    ROW_BLOCK,
    block_matmul,
    column_blocks,
    float32,
    map_elements,
    matmul,
    pack_columns,
    pad_rows,
)
from legato.ops.op import op
from legato.ops.pointwise import swiglu

#: The weights of a range of experts in float32: (w13 [n, 2F, D], w2 [n, D, F]).
ExpertWeights = Callable[[slice], tuple[Tensor, Tensor]]

#: A matrix of the shared expert, and its block scales where it is e4m3; (None, None): there is no shared expert.
SharedWeight = tuple[Tensor | None, Tensor | None]

#: Rows of one expert's product: an expert sees few of the rows that are verified together.
EXPERT_ROWS = 4


@op
def route(x: Tensor, weight: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose k experts per row and weigh them.

    s = sigmoid(weight @ x) in float32; the choice is the k largest of s + bias (bias only chooses); weights = s / (sum
    of the chosen s + 1e-20) * scale. x [T, D], weight [E, D], bias [E] float32, scale = routed_scaling_factor
    -> (ids [T, k] int32, weights [T, k] float32), best choice first, ties to the lowest id.
    Source: "noaux_tc" routing of arXiv:2412.19437 with one group.
    """
    gates = map_elements(torch.sigmoid, matmul(x, weight))
    ids = (gates + bias.to(torch.float32)).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = gates.gather(1, ids)
    return ids.to(torch.int32), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale


def _pack_dense(w13: Tensor, w2: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
    """Column blocks; not of a shared expert in FP8, which goes by its blocks of 128."""
    is_dense = len(shared) == 2
    return (*pack_columns(w13, w2, *(shared if is_dense else ())), *(() if is_dense else shared))


@op(pack=_pack_dense)
def moe_bf16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    """sum over a of weights[t, a] * w2[e] @ swiglu(w13[e] @ x[t]) with e = ids[t, a]; the sum runs in the order of a,
    in float32. Then, where there is a shared expert, plus shared_down @ swiglu(shared_gate_up @ x[t]).

    x [T, D], ids [T, A] int32 (negative: contributes nothing), weights [T, A] float32, w13 [E, 2F, D] (gate rows, then
    up rows) and w2 [E, D, F] bfloat16 or float32, shared_gate_up [2F', D] and shared_down [D, F'] likewise (both or
    none), or e4m3 with float32 scales per 128x128 block (see `linear_fp8_block`); weights as stored or as `moe_bf16.pack`
    made them -> [T, D] in x's dtype.
    Only experts that some row chose are computed.
    """
    y = _moe(x, ids, weights, lambda run: (float32(w13[run]), float32(w2[run])), w13.shape[0])
    return _plus_shared(y, x, (shared_gate_up, shared_gate_up_scale_inv), (shared_down, shared_down_scale_inv))


@op
def moe_fp8_block(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale_inv: Tensor,
    w2: Tensor,
    w2_scale_inv: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    """`moe_bf16` over experts stored as e4m3 with float32 scales per 128x128 block.

    w13 e4m3 [E, 2F, D], w13_scale_inv [E, ceil(2F/128), ceil(D/128)], w2 e4m3 [E, D, F], w2_scale_inv [E, ceil(D/128),
    ceil(F/128)]. Gate and up are quantised as one matrix here; a loader whose F is no multiple of 128 must requantise.
    See `dequantize_fp8_block`.
    """

    def dequantized(run: slice) -> tuple[Tensor, Tensor]:
        return (
            dequantize_fp8_block(w13[run], w13_scale_inv[run]),
            dequantize_fp8_block(w2[run], w2_scale_inv[run]),
        )

    y = _moe(x, ids, weights, dequantized, w13.shape[0])
    return _plus_shared(y, x, (shared_gate_up, shared_gate_up_scale_inv), (shared_down, shared_down_scale_inv))


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
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    """`moe_bf16` over experts stored as NVFP4; gate and up keep their own global scales.

    w13 uint8 [E, 2F, D/2], w13_scale e4m3 [E, 2F, D/16], w13_scale_2 float32 [E, 2] (gate, up), w2 uint8 [E, D, F/2],
    w2_scale e4m3 [E, D, F/16], w2_scale_2 float32 [E]. See `dequantize_nvfp4`.
    """
    half = w13.shape[1] // 2

    def dequantized(run: slice) -> tuple[Tensor, Tensor]:
        globals_13 = w13_scale_2[run].repeat_interleave(half, dim=1)
        return (
            dequantize_nvfp4(w13[run], w13_scale[run], globals_13),
            dequantize_nvfp4(w2[run], w2_scale[run], w2_scale_2[run]),
        )

    y = _moe(x, ids, weights, dequantized, w13.shape[0])
    return _plus_shared(y, x, (shared_gate_up, shared_gate_up_scale_inv), (shared_down, shared_down_scale_inv))


@op
def moe_int4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
) -> Tensor:
    """`moe_bf16` over experts stored as INT4 in groups of 128.

    w13 uint8 [E, 2F, D/2], w13_scale [E, 2F, D/128], w2 uint8 [E, D, F/2], w2_scale [E, D, F/128]. See
    `dequantize_int4`.
    """

    def dequantized(run: slice) -> tuple[Tensor, Tensor]:
        return dequantize_int4(w13[run], w13_scale[run]), dequantize_int4(w2[run], w2_scale[run])

    y = _moe(x, ids, weights, dequantized, w13.shape[0])
    return _plus_shared(y, x, (shared_gate_up, shared_gate_up_scale_inv), (shared_down, shared_down_scale_inv))


def _plus_shared(y: Tensor, x: Tensor, gate_up: SharedWeight, down: SharedWeight) -> Tensor:
    """y + the shared expert's rows, rounded as a plain MLP of the model rounds."""
    if gate_up[0] is None or down[0] is None:
        return y
    return y + _shared_linear(swiglu.reference(_shared_linear(x, gate_up)), down)


def _shared_linear(x: Tensor, stored: SharedWeight) -> Tensor:
    weight, scale_inv = stored
    assert weight is not None, "both matrices or none"
    if scale_inv is None:
        return linear_bf16.reference(x, weight)
    return linear_fp8_block.reference(x, weight, scale_inv)


def _moe(x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, num_experts: int) -> Tensor:
    """Each expert takes its rows in blocks of four; then every row sums its choices in order."""
    if x.device.type != "cpu":
        return _moe_masked(x, ids, weights, expert_weights, num_experts)
    rows = float32(x)
    num_rows, width = rows.shape
    choices = ids.shape[1]
    chosen: list[int] = ids.reshape(-1).tolist()
    blocks = _blocks_of_pairs(chosen)
    # Where an expert has fewer rows left than a block, its first row fills the rest; those results are not read.
    picked = [some[at if at < len(some) else 0] // choices for _, some in blocks for at in range(EXPERT_ROWS)]
    if not blocks:
        return torch.zeros_like(x)
    inputs = rows.index_select(0, torch.tensor(picked, device=rows.device)).split(EXPERT_ROWS)
    outputs = [rows.new_zeros(1, width)]  # place 0: what a masked choice adds
    places = [0] * len(chosen)
    held, w13, w2 = -1, rows, rows
    for number, ((expert, some), block) in enumerate(zip(blocks, inputs, strict=True)):
        if expert != held:
            held, (w13, w2) = expert, map(_columns, expert_weights(slice(expert, expert + 1)))
        outputs.append(block_matmul(swiglu.reference(block_matmul(block, w13)), w2))
        for at, pair in enumerate(some):
            places[pair] = 1 + EXPERT_ROWS * number + at
    gathered = torch.cat(outputs).index_select(0, torch.tensor(places, device=rows.device))
    terms = gathered.view(num_rows, choices, width) * weights.unsqueeze(-1)
    total = terms[:, 0]
    for choice in range(1, choices):
        total = total + terms[:, choice]
    return total.to(x.dtype)


def _moe_masked(x: Tensor, ids: Tensor, weights: Tensor, expert_weights: ExpertWeights, num_experts: int) -> Tensor:
    """The same sum by running every expert on every row and keeping what was chosen: nothing is read on the host, so that
    a graph can hold it. Rows go in blocks, as everywhere in the references."""
    rows = pad_rows(x)
    terms = rows.new_zeros(*ids.shape, x.shape[1])
    for expert in range(num_experts):
        w13, w2 = map(_columns, expert_weights(slice(expert, expert + 1)))
        blocks = [block_matmul(swiglu.reference(block_matmul(block, w13)), w2) for block in rows.split(ROW_BLOCK)]
        product = torch.cat(blocks)[: x.shape[0]]
        terms = torch.where((ids == expert).unsqueeze(-1), product.unsqueeze(1), terms)
    terms = terms * weights.unsqueeze(-1)
    total = terms[:, 0]
    for choice in range(1, ids.shape[1]):
        total = total + terms[:, choice]
    return total.to(x.dtype)


def _blocks_of_pairs(chosen: list[int]) -> list[tuple[int, list[int]]]:
    """Pairs (row, choice) by their expert, at most EXPERT_ROWS at a time: [(expert, pairs)], by ascending expert."""
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(chosen):
        if expert >= 0:
            pairs.setdefault(expert, []).append(pair)
    return [
        (expert, members[first : first + EXPERT_ROWS])
        for expert, members in sorted(pairs.items())
        for first in range(0, len(members), EXPERT_ROWS)
    ]


def _columns(weights: Tensor) -> Tensor:
    """One expert's matrix as column blocks: packed already, or seen so."""
    return weights.flatten(0, 1) if weights.dim() == 4 else column_blocks(weights)


from legato.ops.experts.cases import CASES as CASES  # noqa: E402  behind the ops that they name
