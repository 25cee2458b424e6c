"""What the real iteration must take by what its launches take in chains of their own, beside the skeleton: the sum over the
launches of a rank of 8 (78 layers, K = 5, one request behind 8,192 tokens, 44 experts of a layer reached).

    python records/2026-11-30-products-shorter/predict.py

Products are those of `rows.jsonl`, everything else of the record named beside it; microseconds in a chain.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from legato.bench.launches import GLM_5_2, Launch, Rank, iteration
from legato.model.spec import ModelSpec

HERE = Path(__file__).parent
#: (launch, rows) -> us, and the record that has it. Without rows: for any.
OTHERS: dict[tuple[str, int | None], tuple[float, str]] = {
    ("prologue", None): (1.41, "prologue: tail of a layer"),
    ("attend", 6): (7.0, "sparse-mla: 6 rows of one request, 8 heads, bfloat16"),
    ("attend", 1): (6.4, "sparse-mla: 1 row, 8 heads, bfloat16"),
    ("absorb_v", None): (1.42, "prologue: W_UV"),
    ("index_scores", None): (3.3, "index-scores: 4K, 3.2, and 4 KB more"),
    ("top_k", None): (5.0, "selection: 6 rows of 8192"),
    ("router", 6): (4.87, "experts-bars: router with its choice"),
    ("router", 1): (4.40, "experts-bars: router with its choice"),
    ("experts", 6): (43.90, "experts-bars: NVFP4, 6 rows, 44 experts"),
    ("experts", 1): (26.40, "experts-bars: bfloat16, 1 row"),
    ("experts of the MTP layer", 6): (99.58, "experts-bars: bfloat16, 6 rows, 44 experts"),
    ("add_norm", None): (1.46, "pointwise, a chain of its own"),
    ("norm", None): (1.32, "prologue: rms_norm of 6144"),
    ("mtp_inputs", None): (1.61, "prologue: mtp_inputs"),
    ("choose", None): (3.0, "not recorded apart: a choice among logits"),
}
#: A norm on the way in costs this much over the product (prologue: 3.53 for 2.84 and 6.60 for 6.17).
NORMED = {(2048, 2048): 0.6, (6144, 2048): 0.45}


def products() -> dict[tuple[int, int, int], float]:
    """(outputs, inputs, rows) -> us of our bfloat16 products in `rows.jsonl`."""
    lines = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    ours = [line for line in lines if line["name"] == "linear_bf16" and line["implementation"] == "sm90"]
    return {(line["case"]["n"], line["case"]["k"], line["case"]["rows"]): line["median_us"] for line in ours}


def predicted(launch: Launch, measured: dict[tuple[int, int, int], float]) -> float:
    if launch.name == "experts" and launch.outputs > 30000:
        return OTHERS["experts of the MTP layer", launch.rows][0]
    other = OTHERS.get((launch.name, launch.rows)) or OTHERS.get((launch.name, None))
    if other is not None:
        return other[0]
    shape = (launch.outputs, launch.inputs)
    us = measured.get((*shape, launch.rows)) or measured[(*shape, 6)]  # one row takes up to 0.3 us less
    return us + (NORMED.get(shape, 0.0) if launch.name == "q_b" else 0.0)


def main() -> None:
    measured = products()
    sums, counts = Counter[str](), Counter[str]()
    for launch in iteration(Rank(ModelSpec.from_config(GLM_5_2, name="GLM-5.2"), 8), 5):
        sums[launch.name] += predicted(launch, measured)
        counts[launch.name] += 1
    print("| launch | launches | us in all |\n|---|---|---|")
    for name, us in sums.most_common():
        print(f"| {name} | {counts[name]} | {us:,.0f} |")
    skeleton = json.loads((HERE / "skeleton.jsonl").read_text().splitlines()[-1])
    print(f"\nsum {sum(sums.values()) / 1e3:.2f} ms; skeleton {skeleton['median_us'] / 1e3:.3f} ms")


if __name__ == "__main__":
    main()
