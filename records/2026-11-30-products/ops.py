"""The iteration's skeleton, then the dense products against memory and cuBLAS: `legato bench ops gemm` for the cases that the
record is about, in one process. Run from the root:

PYTHONPATH=. python3 records/2026-11-30-products/ops.py SKELETON.jsonl OPS.jsonl
"""

import sys
import time
from pathlib import Path

import torch

from legato.bench.launches import GLM_5_2, Rank, iteration
from legato.bench.ops import described, measure_one
from legato.bench.record import Setting, append
from legato.bench.skeleton import measure
from legato.model.spec import ModelSpec
from legato.ops.case import Case
from legato.ops.gemm import CASES
from legato.ops.op import implemented

FUSED = ("linear_fp8_block_normed", "linear_bf16_normed", "linear_bf16_best", "linear_fp8_block_best", "linear_swiglu")
ROWS = (6, 1, 16)
"""In the order in which they are timed."""


def order(case: Case) -> tuple[int, int]:
    """Six rows first, then one, then 16; plain products before those with something in them."""
    return ROWS.index(int(described(case)["rows"])), ("linear_bf16", "linear_fp8_block", *FUSED).index(case.op.name)


def wanted(case: Case) -> bool:
    names = ("linear_bf16", "linear_fp8_block", *FUSED)
    return case.on == "gpu" and case.op.name in names and described(case)["rows"] in ROWS


def main() -> None:
    skeleton, ops = map(Path, sys.argv[1:])
    device, began = torch.device("cuda"), time.perf_counter()
    for target in ("sm90", "cublas"):
        implemented(target)
    setting = Setting.here(device)
    launches = iteration(Rank(ModelSpec.from_config(GLM_5_2, name="GLM-5.2"), 8), 5)
    found = measure(launches, device)
    line = found.fields(setting.gpu, {"model": "GLM-5.2", "tp": 8, "k": 5, "format": "nvfp4"})
    append(skeleton, [line], setting)
    print(line, flush=True)
    torch.cuda.empty_cache()
    for case in sorted(filter(wanted, CASES), key=order):
        for target in ("sm90", "cublas") if case.op.name == "linear_bf16" else ("sm90",):
            figure = measure_one(case, case.op.implementations[target], device)
            append(ops, [figure.fields(setting.gpu)], setting)
            chain, alone = (None if s is None else round(s.median_us, 2) for s in (figure.chain, figure.isolated))
            print(
                f"{time.perf_counter() - began:5.1f} {case.name} {target} {chain} {alone} {figure.fault or ''}",
                flush=True,
            )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
