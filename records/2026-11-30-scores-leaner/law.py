"""How fast float32 arithmetic runs beside FP8 products of another warpgroup, and how much it holds those up. From the root:

PYTHONPATH=. python3 records/2026-11-30-scores-leaner/law.py OUTPUT.jsonl

132 blocks; one warpgroup multiplies tiles as six rows of index scores do (64 x 192 x 128 in e4m3, in parts of 128 and 64
columns, each tile waited for: 384 cycles at the tensor cores' rate); one or two others do the arithmetic.
"""

import sys
from pathlib import Path

import torch

from legato.bench.record import Setting, append
from legato.ops.build import Kernel, Launch, Source

HERE = Path(__file__).parent
DEVICE = torch.device("cuda")
RECTIFY = ("nothing", "x + |x|", "saturated product", "maximum")
SHARED_BYTES = 49152
LAUNCH = Launch(grid=(132,), block=(384,), shared_bytes=SHARED_BYTES)


def kernel(rectify: int, multiply: int) -> Kernel:
    return Kernel(Source(HERE / "law.cu", {"RECTIFY": rectify, "MULTIPLY": multiply}), "law", shared_bytes=SHARED_BYTES)


def measure(rectify: int, multiply: int) -> dict[str, object]:
    law, out = kernel(rectify, multiply), torch.empty(132 * 384 + 512, device=DEVICE)
    clocks = torch.zeros(132, 4, dtype=torch.int64, device=DEVICE)
    a_round = 32 * ((rectify > 0) + multiply)

    def run(multiplying: int, adding: int, rounds: int, loops: int) -> list[float]:
        for _ in range(2):
            out.normal_()
            law(LAUNCH, multiplying, adding, rounds, loops, out, clocks)
        return clocks.double().median(0).values.tolist()

    found: dict[str, object] = {"bench": "law", "rectify": RECTIFY[rectify], "multiply_add": bool(multiply)}
    for adding in (1, 2):
        for multiplying in (0, 1):  # the products go on for longer
            cycles = run(multiplying, adding, 300, 400 * adding)[2] / (300 * a_round) / adding
            found[f"cycles_an_instruction_{adding}_groups{'_beside_products' if multiplying else ''}"] = round(
                cycles, 3
            )
        # the arithmetic goes on for longer
        found[f"cycles_a_tile_beside_{adding}_groups"] = round(run(1, adding, 3000, 100)[0] / 100)
    found["cycles_a_tile_alone"] = round(run(1, 0, 0, 100)[0] / 100)
    print(found, flush=True)
    return found


if __name__ == "__main__":
    kinds = [(rectify, multiply) for multiply in (0, 1) for rectify in range(4) if rectify or multiply]
    append(Path(sys.argv[1]), [measure(*kind) for kind in kinds], Setting.here(DEVICE))
