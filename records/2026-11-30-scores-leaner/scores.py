"""Index scores alone, and with top-k after them, the plan made before as once a forward. Run from the repository root:

PYTHONPATH=. python3 records/2026-11-30-scores-leaner/scores.py OUTPUT.jsonl

Rows of one request, pages in random order, keys that rotate over more than 150 MB, one buffer of scores.
"""

import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from legato.bench.record import Setting, append
from legato.bench.timing import time_calls
from legato.ops.cache.layout import INDEX_KEY_BYTES, INDEX_PAGE_BYTES, quantize_groups
from legato.ops.op import implemented
from legato.ops.score import index_scores
from legato.ops.select import top_k

DEVICE = torch.device("cuda")
K = 2048
#: (rows, context)
SHAPES = (
    *((6, context) for context in (81920, 1 << 20, 4096, 16384, 65536, 131072, 262144)),
    *((rows, 81920) for rows in (1, 2, 4, 8)),
)
#: Seconds without work before each measurement: long ones heat the board until it lowers its clock.
PAUSE = 0.12


def inputs(rows: int, context: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    pages = math.ceil(context / 64)
    codes, scales = quantize_groups(torch.randn(pages * 64, 128, device=DEVICE, generator=generator))
    cache = torch.empty(pages, INDEX_PAGE_BYTES, dtype=torch.uint8, device=DEVICE)
    cache[:, :INDEX_KEY_BYTES] = codes.view(torch.uint8).view(pages, -1)
    cache[:, INDEX_KEY_BYTES:] = scales.view(pages, 64).view(torch.uint8)
    table = torch.randperm(pages, device=DEVICE, generator=generator).int().view(1, -1)
    q, scale = quantize_groups(torch.randn(rows, 32, 128, device=DEVICE, generator=generator))
    gates = torch.randn(rows, 32, device=DEVICE, generator=generator) / 64 * scale.squeeze(-1)
    request = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    lengths = context - rows + 1 + torch.arange(rows, dtype=torch.int32, device=DEVICE)
    return q, gates, cache, table, request, lengths


def measure(rows: int, context: int) -> list[dict[str, object]]:
    score, choose = index_scores.implementations["sm90"], top_k.implementations["sm90"]
    assert score.plan is not None
    generator = torch.Generator(DEVICE).manual_seed(context)
    key_bytes = math.ceil(context / 64) * INDEX_PAGE_BYTES
    sets = [inputs(rows, context, generator) for _ in range(max(2, min(24, math.ceil(150e6 / key_bytes))))]
    plans = [score.plan(*made[3:]) for made in sets]

    def alone(at: int):
        def call() -> None:
            score.run(*sets[at], plans[at])  # dropped, so that the next call gets the same memory

        return call

    def both(at: int):
        made = sets[at]
        return lambda: choose.run(score.run(*made, plans[at]), made[5], K, made[3], made[4])

    lines: list[dict[str, object]] = []
    for name, call in (("index_scores", alone), ("index_scores + top_k", both)):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        taken, _ = time_calls([call(at % len(sets)) for at in range(max(20, len(sets)))], DEVICE)
        print(
            f"{name:20} {rows} {context:>8} {taken.median_us:7.2f} us [{taken.p20_us:.2f} {taken.p80_us:.2f}]",
            flush=True,
        )
        case = {"rows": rows, "length": context, "heads": 32}
        lines.append(
            {"bench": "ops", "name": name, "implementation": "sm90", "case": case, **asdict(taken), "bytes": key_bytes}
        )
    return lines


if __name__ == "__main__":
    implemented("sm90")
    with torch.inference_mode():
        for shape in SHAPES:
            append(Path(sys.argv[1]), measure(*shape), Setting.here(DEVICE))
