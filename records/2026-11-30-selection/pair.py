"""Index scores and top-k one after the other, as a full layer runs them. Run from the repository root:

PYTHONPATH=. python3 records/2026-11-30-selection/pair.py OUTPUT.jsonl

Rows of one request, page table as wide as the context, or a million positions wide as in the engine's graphs ("width").
Keys rotate over more than 150 MB; the plan of the scores is made before, as once per forward.
"""

import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from legato.bench.record import Setting, append
from legato.bench.timing import time_calls, time_isolated
from legato.ops.cache.layout import INDEX_KEY_BYTES, INDEX_PAGE_BYTES, quantize_groups
from legato.ops.op import implemented
from legato.ops.score import index_scores
from legato.ops.select import top_k

DEVICE = torch.device("cuda")
K = 2048
#: (rows, context, width)
SHAPES = (
    *((6, context, context) for context in (4096, 8192, 16384, 32768, 65536, 81920, 131072, 262144, 1 << 20)),
    *((rows, 81920, 81920) for rows in (1, 8)),
    *((6, context, 1 << 20) for context in (2048, 8192, 81920)),
)


def inputs(rows: int, context: int, width: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    pages = math.ceil(context / 64)
    codes, scales = quantize_groups(torch.randn(pages * 64, 128, device=DEVICE, generator=generator))
    cache = torch.empty(pages, INDEX_PAGE_BYTES, dtype=torch.uint8, device=DEVICE)
    cache[:, :INDEX_KEY_BYTES] = codes.view(torch.uint8).view(pages, -1)
    cache[:, INDEX_KEY_BYTES:] = scales.view(pages, 64).view(torch.uint8)
    table = torch.zeros(1, math.ceil(width / 64), dtype=torch.int32, device=DEVICE)
    table[0, :pages] = torch.randperm(pages, device=DEVICE, generator=generator).int()
    q, scale = quantize_groups(torch.randn(rows, 32, 128, device=DEVICE, generator=generator))
    gates = torch.randn(rows, 32, device=DEVICE, generator=generator) / 64 * scale.squeeze(-1)
    request = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    lengths = context - rows + 1 + torch.arange(rows, dtype=torch.int32, device=DEVICE)
    return q, gates, cache, table, request, lengths


def measure(rows: int, context: int, width: int) -> dict[str, object]:
    score, choose = index_scores.implementations["sm90"], top_k.implementations["sm90"]
    assert score.plan is not None
    generator = torch.Generator(DEVICE).manual_seed(context)
    key_bytes = math.ceil(context / 64) * INDEX_PAGE_BYTES
    sets = [inputs(rows, context, width, generator) for _ in range(max(2, min(24, math.ceil(150e6 / key_bytes))))]
    plans = [score.plan(*made[3:]) for made in sets]

    def call(at: int):
        made, plan = sets[at], plans[at]
        return lambda: choose.run(score.run(*made, plan), made[5], K, made[3], made[4])

    calls = [call(at % len(sets)) for at in range(max(20, len(sets)))]
    chain, results = time_calls(calls, DEVICE)
    at = (len(calls) - 1) % len(sets)
    _, _, _, table, request, lengths = sets[at]
    slots, counts = results[-1]
    expected = top_k.reference(score.run(*sets[at], plans[at]), lengths, K, table, request)
    correct = torch.equal(slots, expected[0]) and torch.equal(counts, expected[1])
    isolated = time_isolated(calls, DEVICE)
    print(f"{rows} {context:>8} {width:>8} {chain.median_us:7.2f} us [{chain.p20_us:.2f} {chain.p80_us:.2f}]"
          f" isolated {isolated.median_us:.2f} {'' if correct else 'WRONG'}", flush=True)  # fmt: skip
    return {
        "bench": "ops",
        "name": "index_scores + top_k",
        "implementation": "sm90",
        "case": {"rows": rows, "length": context, "width": width, "k": K, "heads": 32},
        **asdict(chain),
        "isolated_us": isolated.median_us,
        "bytes": key_bytes + rows * (context * 8 + K * 8),
        "correct": correct,
    }


if __name__ == "__main__":
    implemented("sm90")
    with torch.inference_mode():
        append(Path(sys.argv[1]), [measure(*shape) for shape in SHAPES], Setting.here(DEVICE))
