"""The router's choice and the chosen experts' work.

Owns routing and the grouped expert product in each storage format, with a dense expert that every row takes where there
is one. Called by `legato.model` (route) and `legato.quant` (the products).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from legato.ops.case import BFLOAT16, FLOAT32, Case, Draw, Tolerance, Where
from legato.ops.gemm import linear_bf16, linear_fp8_block
from legato.ops.gemm.dequantize import dequantize_fp8_block, dequantize_int4, dequantize_nvfp4
from legato.ops.gemm.stored import fp8_weight, int4_weight, nvfp4_weight
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
from legato.ops.op import Op, op
from legato.ops.pointwise import swiglu

#: The weights of a range of experts in float32: (w13 [n, 2F, D], w2 [n, D, F]).
ExpertWeights = Callable[[slice], tuple[Tensor, Tensor]]

#: A matrix of the shared expert, and its block scales where it is e4m3; (None, None): there is no shared expert.
SharedWeight = tuple[Tensor | None, Tensor | None]

#: Of so many rows that they are sorted by expert: what a choice adds is rounded to bfloat16 before a row sums it, and may cancel.
_SORTED = Tolerance(2.0**-7, 2.0**-5)
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


@op(pack=pack_columns)
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


def _stored(name: str, draw: Draw, sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    experts, width, hidden = sizes
    w13, w2 = (experts, 2 * width, hidden), (experts, hidden, width)
    match name:
        case "moe_fp8_block":
            return (*fp8_weight(draw, *w13), *fp8_weight(draw, *w2))
        case "moe_int4":
            return (*int4_weight(draw, *w13), *int4_weight(draw, *w2))
        case "moe_nvfp4":
            # Codes times block scales are about 800: weights come out as those of the other formats.
            globals_13 = draw.uniform(experts, 2, low=0.5, high=1.5) * hidden**-0.5 / 800
            globals_2 = draw.uniform(experts, low=0.5, high=1.5) * width**-0.5 / 800
            return (*nvfp4_weight(draw, *w13), globals_13, *nvfp4_weight(draw, *w2), globals_2)
        case _:
            return draw.normal(*w13, dtype=dtype, scale=hidden**-0.5), draw.normal(*w2, dtype=dtype, scale=width**-0.5)


def _moe_case(
    moe: Op[..., Tensor], rows: int, choices: int, sizes: tuple[int, int, int], dtype: torch.dtype, on: Where = "any"
) -> Case:
    """`sizes` = (E, F, D). Each row has `choices` different experts; of several rows one has its last choice masked."""

    def make(draw: Draw) -> tuple[Any, ...]:
        ids = draw.uniform(rows, sizes[0]).argsort(1)[:, :choices].to(torch.int32)
        if rows > 1:
            ids[rows // 2, -1] = -1
        weights = draw.uniform(rows, choices, low=0.1, high=1.0)
        return draw.normal(rows, sizes[2], dtype=dtype), ids, weights, *_stored(moe.name, draw, sizes, dtype)

    active = min(sizes[0], rows * choices)
    return Case(
        moe,
        f"{moe.name} rows={rows} choices={choices} experts={sizes[0]} f={sizes[1]} d={sizes[2]} {str(dtype)[6:]}",
        make,
        Tolerance(1e-5, 3e-5) if dtype == torch.float32 else _SORTED if rows > 128 else BFLOAT16,
        weights=_weights_of(moe),
        bytes=_bytes_of(moe, active, sizes, dtype) + 2 * rows * sizes[2] * dtype.itemsize,
        flops=6 * rows * choices * sizes[1] * sizes[2],
        on=on,
    )


@dataclass(frozen=True)
class _Routing:
    """`rows` rows choose 8 experts each, `distinct` between them, of which every row chooses the first `everyones`."""

    rows: int
    distinct: int
    everyones: int = 0

    def ids(self, draw: Draw, experts: int) -> Tensor:
        every = torch.arange(self.everyones, device=draw.device).expand(self.rows, self.everyones)
        own = torch.arange(self.rows * (8 - self.everyones), device=draw.device) % (self.distinct - self.everyones)
        chosen = torch.cat((every, own.view(self.rows, -1) + self.everyones), dim=1)
        return draw.distinct(experts, experts)[chosen]

    @property
    def words(self) -> str:
        return f"rows={self.rows} distinct={self.distinct}" + (f" everyones={self.everyones}" if self.everyones else "")


def _production_case(
    moe: Op[..., Tensor], routing: _Routing, sizes: tuple[int, int, int], shared: str | None = "bf16"
) -> Case:
    """bfloat16 rows, and a shared expert as wide as the others in bfloat16 ("bf16"), FP8 blocks ("fp8") or none. `sizes` = (E, F,
    D)."""
    (experts, width, hidden), rows = sizes, routing.rows

    def make(draw: Draw) -> tuple[Any, ...]:
        x, weights = draw.normal(rows, hidden, dtype=torch.bfloat16), draw.uniform(rows, 8, low=0.1, high=1.0)
        return x, routing.ids(draw, experts), weights, *_stored(moe.name, draw, sizes, torch.bfloat16)

    # Sums are around 5, and their inner rows are rounded: an error of half a percent of that. Of many rows the library multiplies
    # a shared expert's FP8 weights, which are rounded to bfloat16 with their scales: twice that.
    far = 2.0**-2 if shared == "fp8" and rows > 128 else 2.0**-3
    case = Case(
        moe,
        f"{moe.name} {routing.words} experts={experts} f={width} d={hidden}",
        make,
        Tolerance(2.0**-7, far),
        weights=_weights_of(moe),
        bytes=_bytes_of(moe, routing.distinct, sizes, torch.bfloat16) + 4 * rows * hidden,
        flops=6 * rows * 8 * width * hidden,
        on="gpu",
    )
    return case if shared is None else _with_shared(case, rows, (width, hidden), shared)


def _with_shared(case: Case, rows: int, sizes: tuple[int, int], form: str) -> Case:
    """The same with a shared expert; `sizes` = (F, D), `form`: bf16 or fp8."""
    width, hidden = sizes

    def make(draw: Draw) -> tuple[Any, ...]:
        given = case.make(draw)
        if form == "fp8":
            gate_up, gate_up_scale_inv = fp8_weight(draw, 2 * width, hidden)
            down, down_scale_inv = fp8_weight(draw, hidden, width)
            return *given, gate_up, down, gate_up_scale_inv, down_scale_inv
        gate_up = draw.normal(2 * width, hidden, dtype=torch.bfloat16, scale=hidden**-0.5)
        return *given, gate_up, draw.normal(hidden, width, dtype=torch.bfloat16, scale=width**-0.5)

    first = case.weights[-1] + 1
    return replace(
        case,
        name=f"{case.name} shared{'' if form == 'bf16' else ' in FP8'}",
        make=make,
        weights=(*case.weights, *range(first, first + (4 if form == "fp8" else 2))),
        bytes=case.bytes + 3 * width * hidden * (1 if form == "fp8" else 2),
        flops=case.flops + 6 * rows * width * hidden,
        # Both parts are rounded before they are added, and so are the shared expert's inner rows.
        tolerance=Tolerance(case.tolerance.relative, max(case.tolerance.absolute, 2.0**-5)),
    )


def _weights_of(moe: Op[..., Tensor]) -> tuple[int, ...]:
    return tuple(range(3, 3 + {"moe_bf16": 2, "moe_nvfp4": 6}.get(moe.name, 4)))


def _bytes_of(moe: Op[..., Tensor], active: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Of the weights of `active` experts."""
    bits = {"moe_fp8_block": 8, "moe_nvfp4": 4.5, "moe_int4": 4.125}.get(moe.name, 8 * dtype.itemsize)
    return int(active * 3 * sizes[1] * sizes[2] * bits / 8)


def _route_case(
    rows: int, experts: int, k: int, hidden: int, dtype: torch.dtype = torch.float32, on: Where = "any"
) -> Case:
    return Case(
        route,
        f"route rows={rows} experts={experts} k={k} d={hidden}{'' if on == 'any' else ' bfloat16'}",
        lambda draw: (
            draw.normal(rows, hidden, dtype=dtype),
            draw.normal(experts, hidden, dtype=dtype, scale=hidden**-0.5).to(torch.float32),
            draw.normal(experts, scale=0.3),
            k,
            2.5,
        ),
        FLOAT32,
        weights=(1,),
        bytes=experts * hidden * (4 if on == "any" else 2),
        flops=2 * rows * experts * hidden,
        on=on,
    )


_RANK_OF_8 = (256, 256, 6144)
_PRODUCTS = (moe_bf16, moe_fp8_block, moe_nvfp4, moe_int4)
_SHARED = ("bf16", "fp8")
CASES = (
    *(_route_case(rows, *shape) for rows in (1, 6, 37) for shape in ((8, 2, 256), (256, 8, 512))),
    *(_route_case(rows, 256, 8, 6144, torch.bfloat16, "gpu") for rows in (1, 6, 16)),
    *(_moe_case(moe, rows, 2, (8, 128, 128), torch.float32) for moe in _PRODUCTS for rows in (1, 6, 37)),
    *(_moe_case(moe, 6, 2, (8, 128, 128), torch.bfloat16) for moe in _PRODUCTS),
    # Every row of 40 on the same few experts: groups longer than a block.
    _moe_case(moe_bf16, 40, 3, (4, 64, 64), torch.float32),
    *(
        _with_shared(_moe_case(moe, 6, 2, (8, 128, 128), torch.bfloat16), 6, (128, 128), form)
        for moe in _PRODUCTS
        for form in _SHARED
    ),
    # More rows than one launch takes: sorted, with many and with few for an expert.
    *(_moe_case(moe, 130, 2, (8, 128, 256), torch.bfloat16) for moe in _PRODUCTS),
    _moe_case(moe_nvfp4, 130, 2, (16, 128, 256), torch.bfloat16),
    # GLM-5.2, one rank of 8: the distinct experts of unrelated rows, those of rows of one text (33), all rows on the same.
    *(_production_case(moe, _Routing(*routing), _RANK_OF_8) for moe in _PRODUCTS for routing in ((1, 8), (6, 44))),
    *(
        _production_case(moe_nvfp4, _Routing(*routing), _RANK_OF_8)
        for routing in ((6, 33), (6, 8), (16, 100), (64, 223))
    ),
    # As FP8 releases have it, and others whose dense weights are kept in FP8.
    *(_production_case(moe, _Routing(6, 44), _RANK_OF_8, "fp8") for moe in (moe_fp8_block, moe_nvfp4, moe_int4)),
    # A prompt's rows: as many for an expert as in 4096 and in 2048 rows of the model.
    *(_production_case(moe, _Routing(256, 16), (16, 256, 6144)) for moe in _PRODUCTS),
    _production_case(moe_fp8_block, _Routing(256, 16), (16, 256, 6144), "fp8"),
    _production_case(moe_nvfp4, _Routing(512, 32), (32, 2048, 6144)),
    # At full width, with fewer experts: only the chosen ones count.
    *(
        _production_case(moe_nvfp4, _Routing(*routing), (experts, 2048, 6144), None)
        for experts, *routing in ((128, 1, 8), (128, 6, 44), (128, 16, 100), (224, 64, 223))
    ),
    # One expert with every row, beside as many others as rows can name.
    *(_production_case(moe_nvfp4, _Routing(*routing, 1), _RANK_OF_8) for routing in ((6, 43), (16, 100), (64, 223))),
)
