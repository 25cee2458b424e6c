"""The cases of the experts: routers, and products in every format, small ones and those of GLM-5.2.

Owns how ids and weights are drawn, and what a product of experts must read. Imported by `experts`, behind its ops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from legato.ops.case import BFLOAT16, FLOAT32, Case, Draw, Tolerance, Where
from legato.ops.experts import moe_bf16, moe_fp8_block, moe_int4, moe_nvfp4, route
from legato.ops.gemm.stored import fp8_weight, int4_weight, nvfp4_weight
from legato.ops.op import Op

#: Of so many rows that they are sorted by expert: what a choice adds is rounded to bfloat16 before a row sums it, and may cancel.
_SORTED = Tolerance(2.0**-7, 2.0**-5)


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
    # K that divides among all warps: of many rows, four of them share a unit.
    *(
        _with_shared(_moe_case(moe, 20, 2, (4, 128, 2048), torch.bfloat16), 20, (128, 2048), "bf16")
        for moe in _PRODUCTS
    ),
    # So many pairs that their tables have short entries.
    _with_shared(_moe_case(moe_nvfp4, 96, 6, (8, 128, 128), torch.bfloat16), 96, (128, 128), "bf16"),
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
        for routing in ((6, 33), (6, 8), (16, 100), (64, 223), (96, 244), (128, 252))
    ),
    *(_production_case(moe, _Routing(96, 244), _RANK_OF_8) for moe in (moe_bf16, moe_fp8_block, moe_int4)),
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
