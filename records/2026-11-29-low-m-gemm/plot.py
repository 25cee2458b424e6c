"""Draws speedup.svg from gemm.jsonl: how many times as fast as cuBLAS, by rows, for the recorded tilings.

Run in this folder; needs matplotlib (the extra `plots`).
"""

import json
import math
from pathlib import Path

from matplotlib.figure import Figure

lines = [json.loads(line) for line in Path("gemm.jsonl").read_text().splitlines()]
cublas: dict[tuple[int, int, int], float] = {}
for line in lines:
    if line["implementation"] == "cublas":
        cublas[line["case"]["n"], line["case"]["k"], line["case"]["rows"]] = line["median_us"]
ours = [line for line in lines if line["name"] == "linear_bf16" and line.get("recorded") and line["correct"]]

figure = Figure(figsize=(8, 4.2), layout="constrained")
axes = figure.subplots(1, 2, sharey=True)
for axis, field, title in zip(
    axes, ("median_us", "isolated_us"), ("in a chain (programmatic launches)", "alone"), strict=True
):
    for rows, place in ((1, 0), (6, 1), (16, 2)):
        gains = [cublas[c["n"], c["k"], rows] / line[field] for line in ours if (c := line["case"])["rows"] == rows]
        sizes = [line["bytes"] / 1e6 for line in ours if line["case"]["rows"] == rows]
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        axis.scatter(
            sizes, gains, s=18, color=f"C{place}", label=f"{rows} row{'s' * (rows > 1)}, geometric mean {mean:.2f}"
        )
    axis.axhline(1, color="gray", linewidth=0.8)
    axis.set(xscale="log", xlabel="MB of weights", title=title)
    axis.legend(fontsize=8)
axes[0].set_ylabel("times as fast as cuBLAS in the same run")
figure.savefig("speedup.svg", metadata={"Date": None})
