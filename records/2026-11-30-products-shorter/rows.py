"""What this record ran: `linear_bf16` beside cuBLAS in the same run, by rows; `linear_fp8_block` at 1, 6 and 16; the
skeleton. Every figure is that of `legato bench ops`, parity before and after.

    python records/2026-11-30-products-shorter/rows.py rows.jsonl skeleton.jsonl speed-up.png
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from legato.bench import plots
from legato.bench.launches import GLM_5_2, Rank, iteration
from legato.bench.ops import described, measure_one
from legato.bench.record import Setting, append
from legato.bench.skeleton import measure
from legato.model.spec import ModelSpec
from legato.ops.case import Case
from legato.ops.gemm import CASES
from legato.ops.op import implemented

#: A rank of 8: what is measured at every number of rows.
BY_ROWS = ((2784, 6144), (2048, 2048), (6144, 2048), (512, 6144), (6144, 256))
FP8 = (
    (2624, 6144),
    (2784, 6144),
    (3072, 6144),
    (2048, 2048),
    (6144, 2048),
    (512, 6144),
    (6144, 256),
    (6144, 16384),
    (4096, 6144),
    (24576, 6144),
)


def order(case: Case) -> int:
    """The rows of an iteration first, then one and sixteen, then how the shapes of a rank of 8 go on with rows."""
    rows = described(case)["rows"]
    return {6: 0, 16: 1, 1: 2}.get(rows, 3)


def wanted(case: Case) -> bool:
    made = described(case)
    if case.on != "gpu" or "residual" in made.get("is", ""):
        return False
    if case.op.name == "linear_bf16":
        return (made["rows"] in (1, 6, 16) and made["n"] < 30000) or (made["n"], made["k"]) in BY_ROWS
    return case.op.name == "linear_fp8_block" and (made["n"], made["k"]) in FP8 and made["rows"] in (1, 6, 16)


def main() -> None:
    rows, skeleton, picture = map(Path, sys.argv[1:])
    device, began = torch.device("cuda"), time.perf_counter()
    for target in ("sm90", "cublas"):
        implemented(target)
    setting = Setting.here(device)
    found = measure(iteration(Rank(ModelSpec.from_config(GLM_5_2, name="GLM-5.2"), 8), 5), device)
    line = found.fields(setting.gpu, {"model": "GLM-5.2", "tp": 8, "k": 5, "format": "nvfp4"})
    append(skeleton, [line], setting)
    print({key: line[key] for key in ("median_us", "p20_us", "p80_us", "host_us", "launches", "floor_us")}, flush=True)
    torch.cuda.empty_cache()
    lines = []
    for case in sorted(filter(wanted, CASES), key=order):
        times = []
        for target in ("sm90", "cublas") if case.op.name == "linear_bf16" else ("sm90",):
            figure = measure_one(case, case.op.implementations[target], device)
            lines.append(figure.fields(setting.gpu))
            append(rows, lines[-1:], setting)
            chain, alone = (0.0 if s is None else s.median_us for s in (figure.chain, figure.isolated))
            times.append(f"{target} {chain:.2f} / {alone:.2f} {figure.fault or ''}")
        print(f"{time.perf_counter() - began:5.1f} {case.name}: {'   '.join(times)}", flush=True)
        torch.cuda.empty_cache()
    plots.save(plots.speed_up([line for line in lines if line["name"] == "linear_bf16"]), picture)


if __name__ == "__main__":
    main()
