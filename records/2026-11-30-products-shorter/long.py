"""Chains of so many calls that the graph's own start does not count, ours beside cuBLAS (`long.txt`; what ran made the same
calls and was tidied afterwards).

python records/2026-11-30-products-shorter/long.py > long.txt
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from legato.bench.timing import calls_to_rotate, time_calls
from legato.ops.gemm import linear_bf16, linear_fp8_block
from legato.ops.op import implemented

BF16 = (
    (512, 6144),
    (256, 6144),
    (128, 6144),
    (6144, 256),
    (2048, 2048),
    (4096, 2048),
    (6144, 1536),
    (6144, 2048),
    (2624, 6144),
)
FP8 = ((2624, 6144), (2784, 6144))


def main() -> None:
    implemented("sm90")
    device = torch.device("cuda")
    for n, k, bits in (*((*shape, 16) for shape in BF16), *((*shape, 8) for shape in FP8)):
        op = (linear_bf16 if bits == 16 else linear_fp8_block).implementations["sm90"]
        num, found = calls_to_rotate(device, n * k * bits // 8), list[str]()
        raw = torch.randn(num, n, k, device=device, dtype=torch.bfloat16)
        scales = torch.rand(-(-n // 128), k // 128, device=device)
        weights = [op.pack(w) if bits == 16 else op.pack(w.to(torch.float8_e4m3fn), scales) for w in raw]
        weights = [w if isinstance(w, tuple) else (w,) for w in weights]
        for rows in (1, 6, 16):
            x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
            for times in (1, 5):
                turns = list(range(num)) * times
                ours, _ = time_calls([partial(op.run, x, *weights[i]) for i in turns], device)
                line = f"{ours.median_us:.2f}"
                if bits == 16 and rows == 6:
                    library = time_calls([partial(functional.linear, x, raw[i]) for i in turns], device)[0]
                    line += f" / {library.median_us:.2f}"
                found.append(f"{rows} rows, {len(turns)} calls {line}")
        print(f"{n}x{k} {bits} bits: {'; '.join(found)}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
