"""Microseconds of selection over the length of its rows, ours and the baselines, at 1, 6, 32 and 128 rows. Run from the root:

PYTHONPATH=. python3 records/2026-11-30-selection-curve/curve.py OUTPUT.jsonl

k = 2048, normal scores, all rows as long as the table, page transform included. Replays of a graph of at least 20 calls (8 of
`torch_topk`, which is slow), on scores that rotate over more than 120 MB. The first call of every implementation is compared
with the reference as a set; where the sets differ, the line says so and has no time.
"""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from legato.bench.record import Setting, append
from legato.bench.timing import Spread, sample_graph
from legato.ops.op import implemented
from legato.ops.select import top_k

DEVICE = torch.device("cuda")
K = 2048
ROWS = (1, 6, 32, 128)
LENGTHS = (*(1 << bits for bits in range(10, 17)), 81920, *(1 << bits for bits in range(17, 21)))
NAMES = ("sm90", "sm90_clusters", "sm90_blocks", "torch_topk")
ROTATED_BYTES, FEWEST, FEWEST_SLOW, SAMPLES = 120e6, 20, 8, 11


def measure(rows: int, length: int, generator: torch.Generator) -> list[dict[str, object]]:
    num_sets = max(2, min(256, int(ROTATED_BYTES / (rows * length * 4)) + 1))
    scores = [torch.randn(rows, length, device=DEVICE, generator=generator) for _ in range(num_sets)]
    table = torch.randperm(length // 64, device=DEVICE, generator=generator).int()[None]
    lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    rest = lengths, K, table, torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    expected = as_set(top_k.reference(scores[0], *rest))
    lines = []
    for name in NAMES:
        run = top_k.implementations[name].run
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(as_set(run(scores[0], *rest)), expected))
        spread = timed([partial(run, one, *rest) for one in scores], name) if same else None
        lines.append(
            {
                "bench": "ops",
                "name": "top_k",
                "implementation": name,
                "case": {"rows": rows, "length": length, "k": K},
                **(asdict(spread) if spread else {"median_us": None}),
                "bytes": rows * (length * 4 + K * 8),
                "correct": same,
            }
        )
    print(rows, length, *(f"{line['implementation']} {line['median_us']}" for line in lines), flush=True)
    return lines


def as_set(made: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return made[0].sort(1).values, made[1]


def timed(calls: list, name: str) -> Spread:
    count = max(FEWEST_SLOW if name == "torch_topk" else FEWEST, len(calls) if name != "torch_topk" else 0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for at in range(count):
            calls[at % len(calls)]()
    return Spread.of([us / count for us in sample_graph(graph, DEVICE, SAMPLES)], "graph")


if __name__ == "__main__":
    for target in NAMES:
        implemented(target)
    drawn = torch.Generator(DEVICE).manual_seed(0)
    with torch.inference_mode():
        found = [line for rows in ROWS for length in LENGTHS for line in measure(rows, length, drawn)]
    append(Path(sys.argv[1]), found, Setting.here(DEVICE))
