"""Experts of a rank of 8 and of full width at 64 to 256 rows: one launch, launches of 64 rows, sorted rows.

    python rows.py rows.jsonl

Weights are random packed bytes: of the right size and finite, but of no tensor. Every row chooses 8 of 256 experts at random. A
time is that of a call in a graph of CALLS calls, each with rows, choices and a shared expert of its own; one launch must give the
bits of launches of 64 rows (sorted rows: nearly the same numbers).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.experts import sm90, sm90_grouped, sm90_launch
from legato.ops.experts.sm90_launch import Experts, Packed
from legato.ops.experts.sm90_packing import STEP_BYTES, STEP_K
from legato.ops.pointwise import swiglu

DEVICE, HIDDEN, EXPERTS, CALLS = torch.device("cuda"), 6144, 256, 8
Way = Callable[[Packed, Tensor, Tensor, Tensor], Tensor]


def packed(form: str, experts: int, strips: int, inputs: int) -> Tensor:
    scale, shape = inputs**-0.5, (strips, inputs // STEP_K[form], STEP_BYTES[form])
    made = torch.empty(experts, *shape, dtype=torch.uint8, device=DEVICE)
    for expert in made:
        if form == "bf16":
            expert.view(torch.bfloat16).normal_(0, scale)
            continue
        expert.random_(0, 256)
        if form == "nvfp4":
            expert[..., 1024:] = expert[..., 1024:] % 16 + 0x38
        elif form == "int4":
            expert[..., 1024:] = torch.full((16,), scale / 4, dtype=torch.bfloat16, device=DEVICE).view(torch.uint8)
        else:
            expert[..., :2048] &= 0xBF
            expert[..., 2048:2056] = torch.full((2,), scale, device=DEVICE).view(torch.uint8)
    return made


def weights(form: str, width: int, shared: bool) -> list[Packed]:
    w13, w2 = packed(form, EXPERTS, width // 8, HIDDEN), packed(form, EXPERTS, HIDDEN // 16, width)
    factors = torch.full((EXPERTS, 3), HIDDEN**-0.5 / 3, device=DEVICE) if form == "nvfp4" else None
    if not shared:
        return [Packed(w13, w2, factors)]
    both = [(packed("bf16", 1, width // 8, HIDDEN), packed("bf16", 1, HIDDEN // 16, width)) for _ in range(CALLS)]
    return [Packed(w13, w2, factors, *pair) for pair in both]


def sorted_rows(what: Experts) -> Way:
    def run(given: Packed, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        if given.shared13 is None or given.shared2 is None:
            return sm90_grouped.grouped(what, given, x, ids, gates)
        gate_up, down = sm90._shared_in(torch.bfloat16, given.shared13, given.shared2)
        added = functional.linear(swiglu(functional.linear(x, gate_up)), down)
        return sm90_grouped.grouped(what, given, x, ids, gates, added)

    return run


def in_parts(what: Experts, most: int) -> Way:
    def run(given: Packed, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        parts = zip(x.split(most), ids.split(most), gates.split(most), strict=True)
        made = [sm90_launch.launch(what, given, *part) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    return run


def timed(call: Callable[[int], Tensor]) -> list[float]:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(number) for number in range(CALLS)]
    samples: list[float] = []
    for _ in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000 / CALLS)
    del kept
    return sorted(samples[5:])


def drawn_rows(rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    draw = torch.Generator(DEVICE).manual_seed(rows)
    made: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(CALLS):
        x = torch.randn(rows, HIDDEN, device=DEVICE, generator=draw).bfloat16()
        ids = torch.rand(rows, EXPERTS, device=DEVICE, generator=draw).argsort(1)[:, :8].to(torch.int32).contiguous()
        made.append((x, ids, torch.rand(rows, 8, device=DEVICE, generator=draw) + 0.1))
    return made


def measured(form: str, width: int, shared: bool, sets: list[Packed], rows: int) -> Iterator[dict[str, object]]:
    what = Experts(form, "bf16" if shared else None, HIDDEN, width, EXPERTS, sm90_launch.multiprocessors(DEVICE))
    drawn, most = drawn_rows(rows), sm90_launch.MOST_ROWS[form]
    ways = {"launches of 64": in_parts(what, 64), "sorted": sorted_rows(what)}
    if rows <= most:
        ways["one launch"] = in_parts(what, most)
    expected = ways["launches of 64"](sets[0], *drawn[0])
    for name, way in ways.items():
        found = way(sets[0], *drawn[0])
        us = timed(lambda number, way=way: way(sets[number % len(sets)], *drawn[number]))
        yield {
            "bench": "experts_rows",
            "format": form,
            "f": width,
            "shared": shared,
            "rows": rows,
            "distinct": round(statistics.mean(len(ids.unique()) for _, ids, _ in drawn)),
            "way": name,
            "us": round(us[10], 2),
            "p20": round(us[4], 2),
            "p80": round(us[16], 2),
            "same_bits": bool(torch.equal(found, expected)),
            "apart": float((found.float() - expected.float()).norm() / expected.float().norm()),
        }


def main() -> None:
    shapes = [(form, 256, True) for form in sm90_launch.FORMATS] + [(form, 2048, False) for form in sm90_launch.FORMATS]
    for shape in shapes:
        sets = weights(*shape)
        for rows in (64, 96, 128, 160, 192, 256):
            for line in measured(*shape, sets, rows):
                with Path(sys.argv[1]).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(*line.values(), flush=True)
        sets.clear()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
