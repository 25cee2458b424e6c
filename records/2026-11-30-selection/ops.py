"""`legato bench ops select` for long rows and `legato bench ops score` for six rows, in one process. Run from the root:

PYTHONPATH=. python3 records/2026-11-30-selection/ops.py TOP_K.jsonl INDEX_SCORES.jsonl
"""

import sys
from pathlib import Path

from legato.cli.bench import bench_ops

LONG = "top_k rows=* k=2048 length=*[125][478][468] ties=1"
SIX_ROWS = "index_scores rows=6 lengths=[0-9]????* uint8"

if __name__ == "__main__":
    top_k, index_scores = map(Path, sys.argv[1:])
    good = bench_ops(["select"], "sm90", LONG, "auto", top_k)
    sys.exit(not (bench_ops(["score"], "sm90", SIX_ROWS, "auto", index_scores) and good))
