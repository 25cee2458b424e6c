"""What this record ran: the skeleton, `linear_bf16` beside cuBLAS and `linear_fp8_block` at 6, 16 and 1 rows of every shape of
full width and of a rank of 8, and at 6 rows of what ranks of 4 and 2 have besides. The figures of `legato bench ops`, parity
before and after, and chains of 100 launches and more, of which the graph's own start (3 us) is no part.

    python records/2026-11-30-products-all-rows/rows.py rows.jsonl skeleton.jsonl 60   # seconds after which no case begins
    python records/2026-11-30-products-all-rows/rows.py rows.jsonl speed-up.png        # draws what was measured
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from legato.bench import plots
from legato.bench.launches import GLM_5_2, Rank, iteration
from legato.bench.ops import Figure, _fault_of_timed, _rotated, described
from legato.bench.record import Setting, append
from legato.bench.skeleton import measure
from legato.bench.timing import calls_to_rotate, is_cold, time_calls, time_isolated
from legato.model.spec import ModelSpec
from legato.ops.case import Case
from legato.ops.gemm import CASES
from legato.ops.op import implemented

#: Launches of a long chain, at least.
FEWEST = 100
#: The 16 shapes of full width and of a rank of 8 over which means are taken.
SHAPES = {
    (128, 6144),
    (256, 6144),
    (512, 6144),
    (2048, 2048),
    (2624, 6144),
    (3072, 6144),
    (4096, 2048),
    (4096, 6144),
    (6144, 256),
    (6144, 1536),
    (6144, 2048),
    (6144, 12288),
    (6144, 16384),
    (16384, 2048),
    (19360, 6144),
    (24576, 6144),
}


def wanted(rows: int, name: str) -> Iterator[Case]:
    """Cases of so many rows, one of each shape; heads of over 400 MB and products with a residual are left out."""
    seen = set[tuple[int, int]]()
    for case in CASES:
        made = described(case)
        shape = (made["n"], made["k"]) if case.on == "gpu" and case.op.name == name else None
        if (
            shape is None
            or shape in seen
            or made["rows"] != rows
            or made["n"] > 30000
            or "residual" in made.get("is", "")
        ):
            continue
        seen.add(shape)
        yield case


def ordered() -> Iterator[tuple[Case, tuple[str, ...]]]:
    def of_means(case: Case) -> bool:
        made = described(case)
        return (made["n"], made["k"]) in SHAPES | {(2784, 6144)}

    both = ("sm90", "cublas")
    for rows in (6, 16, 1):
        yield from ((case, both) for case in wanted(rows, "linear_bf16") if of_means(case))
        yield from ((case, ("sm90",)) for case in wanted(rows, "linear_fp8_block") if of_means(case))
    yield from ((case, both) for case in wanted(6, "linear_bf16") if not of_means(case))


def timed(case: Case, target: str, device: torch.device, gpu: str) -> dict[str, object]:
    """A line of the record."""
    implementation, num = case.op.implementations[target], calls_to_rotate(device, case.bytes)
    expected = tuple(t.detach().clone() for t in case.outputs(case.op.reference, case.inputs(device)))
    found = case.outputs(implementation.run, case.packed(implementation, case.inputs(device)))
    fault = case.mismatch(found, expected)
    calls, times = _rotated(case, implementation, num, device), math.ceil(FEWEST / num)
    chain, results = time_calls(calls, device)
    longer = time_calls(calls * times, device)[0] if times > 1 else chain
    alone = time_isolated(calls, device)
    fault = fault or _fault_of_timed(case, case.inputs(device), results, expected)
    figure = Figure(case, target, chain, alone, num, is_cold(device, case.bytes, num), fault, 1)
    return {**figure.fields(gpu), "long_us": longer.median_us, "long_calls": num * times}


def main() -> None:
    rows, other = map(Path, sys.argv[1:3])
    if len(sys.argv) == 3:
        lines = map(json.loads, rows.read_text().splitlines())
        plots.save(plots.speed_up([line for line in lines if line["name"] == "linear_bf16"]), other)
        return
    device, began, limit = torch.device("cuda"), time.perf_counter(), float(sys.argv[3])
    for target in ("sm90", "cublas"):
        implemented(target)
    setting = Setting.here(device)
    launches = iteration(Rank(ModelSpec.from_config(GLM_5_2, name="GLM-5.2"), 8), 5)
    for _ in range(3):
        line = measure(launches, device).fields(setting.gpu, {"model": "GLM-5.2", "tp": 8, "k": 5, "format": "nvfp4"})
        append(other, [line], setting)
        print({key: line[key] for key in ("median_us", "p20_us", "p80_us", "host_us", "launches")}, flush=True)
        torch.cuda.empty_cache()
    for case, targets in ordered():
        if time.perf_counter() - began > limit:
            print("time is over before", case.name)
            break
        shown = list[str]()
        for target in targets:
            with torch.inference_mode():
                line = timed(case, target, device, setting.gpu)
            append(rows, [line], setting)
            us = " / ".join(f"{line[key]:.2f}" for key in ("median_us", "long_us", "isolated_us"))
            shown.append(f"{target} {us}{'' if line['correct'] else ' WRONG'}")
        print(
            f"{time.perf_counter() - began:5.1f} {case.name.removeprefix('linear_')}: {'   '.join(shown)}", flush=True
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
