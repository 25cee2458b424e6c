"""Draws latency.png from top_k.jsonl (ours) and the baselines of 2026-11-30-selection-floors: microseconds of a call over the
length of its rows. Run in this folder; needs matplotlib (the extra `plots`)."""

import json
from pathlib import Path

from matplotlib.figure import Figure

#: Public kernels on another machine of the same kind, a day before (median of graph replays; the time of a gap between
#: dependent nodes, about 1.4 us, is in them): SGLang 0.5.23 TopK-V2, sglang-kernel 0.4.5 TopK-V1 (a wrong set from 256K on).
LENGTHS = (4096, 16384, 65536, 81920, 131072, 262144, 1048576)
V2 = {
    1: (2.9, 6.0, 7.2, 7.7, 7.9, 9.0, 17.2),
    6: (3.0, 6.2, 7.5, 8.0, 8.7, 10.3, 19.9),
    32: (3.1, 6.7, 18.8, 24.1, 23.1, 31.1, 93.5),
    128: (3.9, 9.4, 25.6, 28.9, 44.7, 79.6, 337.4),
}
V1 = {
    1: (5.2, 12.7, 33.9, 40.5, 57.1),
    6: (6.4, 13.1, 34.8, 43.3, 61.0),
    32: (7.1, 14.0, 38.6, 46.7, 65.8),
    128: (8.0, 15.8, 42.1, 64.2, 97.3),
}
NAMES = {
    "sm90": "ours",
    "sm90_clusters": "TopK-V2's form, written anew (not exact)",
    "sm90_blocks": "TopK-V1's form, written anew (not exact)",
    "torch_topk": "torch.topk and page transform",
}

BASELINES = "../2026-11-30-selection-floors/curve.jsonl"
lines = [json.loads(line) for line in Path("top_k.jsonl").read_text().splitlines()]
lines += [line for line in map(json.loads, Path(BASELINES).read_text().splitlines()) if line["implementation"] != "sm90"]
figure = Figure(figsize=(11, 8), layout="constrained")
axes = figure.subplots(2, 2)
for axis, rows in zip(axes.flat, (1, 6, 32, 128), strict=True):
    for place, (name, label) in enumerate(NAMES.items()):
        points = sorted(
            (line["case"]["length"], line["median_us"])
            for line in lines
            if line["implementation"] == name and line["correct"] and line["case"]["rows"] == rows
        )
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=f"C{place}", label=label)
    for place, (peer, label) in ((1, (V2, "SGLang TopK-V2 itself")), (2, (V1, "SGLang TopK-V1 itself"))):
        times = peer[rows]
        axis.plot(LENGTHS[: len(times)], times, "--", marker="x", markersize=4, color=f"C{place}", label=label)
    axis.set(yscale="log", title=f"{rows} row{'s' * (rows > 1)}, k = 2048", xlabel="scores of a row")
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
axes[0, 0].set_ylabel("us")
axes[1, 0].set_ylabel("us")
axes[0, 0].legend(fontsize=8)
figure.savefig("latency.png", dpi=110)
