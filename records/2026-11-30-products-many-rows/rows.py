"""What this record ran: products of 36 to 128 rows by `sm90_many.cu` and by what serves without it, in one process: cuBLAS, and
for e4m3 the kernel of few rows as far as it is faster than widening, then the widened weight and cuBLAS.

    python records/2026-11-30-products-many-rows/rows.py figures.jsonl 60   # seconds after which no shape begins

Chains of 20 calls or more in a graph, each on a weight of its own (together more than twice the L2), and calls alone, as
`legato bench ops` takes them. Every form is compared with float64 before it is timed.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from legato.bench.record import Setting, append
from legato.bench.timing import calls_to_rotate, time_calls, time_isolated
from legato.ops.gemm import sm90, sm90_many
from legato.ops.gemm.dequantize import dequantize_fp8_block
from legato.ops.gemm.library import by_library
from legato.ops.gemm.sm90_packing import Kept
from legato.ops.op import implemented

RANK_OF_8 = (
    (2784, 6144),
    (2048, 2048),
    (6144, 2048),
    (512, 6144),
    (6144, 256),
    (4096, 2048),
    (3072, 6144),
    (6144, 1536),
)
FULL_WIDTH = ((2624, 6144), (4096, 6144), (16384, 2048), (6144, 12288), (6144, 16384))
ROWS = (36, 48, 64, 96, 128)


def many(x: Tensor, weight: tuple[Tensor, ...], bits: int) -> Tensor:
    return sm90_many.multiply(x, weight[0], None, *weight[1:])


def before(x: Tensor, weight: tuple[Tensor | Kept, ...], bits: int) -> Tensor:
    """As without the kernel for many rows."""
    if (few := sm90._few(x, weight[0], bits)) is not None:
        return sm90.multiply(sm90.Packed(*few, *weight[1:]), x)
    stored = weight[0].stored if isinstance(weight[0], Kept) else weight[0]
    return by_library(x, stored if bits == 16 else sm90.widened(stored, weight[1]))


def error(found: Tensor, exact: Tensor) -> float:
    """Against float64, in errors of the rounding to bfloat16."""
    return float((found.double() - exact).norm() / (exact.bfloat16().double() - exact).norm())


def main() -> None:
    path, limit, began = Path(sys.argv[1]), float(sys.argv[2]), time.perf_counter()
    device = torch.device("cuda")
    implemented("sm90")
    setting, draw = Setting.here(device), torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    for (outputs, inputs), bits in [(shape, bits) for shape in (*RANK_OF_8, *FULL_WIDTH) for bits in (16, 8)]:
        if time.perf_counter() - began > limit:
            print("time is over before", outputs, inputs, bits)
            break
        num = calls_to_rotate(device, outputs * inputs * bits // 8)
        stored: list[tuple[Tensor, ...]] = []
        for _ in range(num):
            if bits == 16:
                stored.append(((normal(outputs, inputs) * inputs**-0.5).bfloat16(),))
            else:
                scales = normal(-(-outputs // 128), inputs // 128).abs() * 0.03 + 0.01
                stored.append((normal(outputs, inputs).to(torch.float8_e4m3fn), scales))
        packed = [sm90.pack_bf16(*one) if bits == 16 else sm90.pack_fp8(*one) for one in stored]
        packed = [one if isinstance(one, tuple) else (one,) for one in packed]
        x = normal(128, inputs).bfloat16()
        whole = stored[0][0].double() if bits == 16 else dequantize_fp8_block(*stored[0]).double()
        exact = x.double() @ whole.t()
        del whole

        for rows in ROWS:
            shown = list[str]()
            for function, weights in ((many, stored), (before, packed)):
                calls = [partial(function, x[:rows], weight, bits) for weight in weights]
                chain, alone = time_calls(calls, device)[0], time_isolated(calls, device)
                line = {
                    "n": outputs, "k": inputs, "bits": bits, "rows": rows, "what": function.__name__, "calls": num,
                    **chain.fields, "isolated_us": alone.median_us, "error": error(calls[0](), exact[:rows]),
                    "serves": sm90_many.serves(rows, outputs, inputs, bits), "form": str(sm90_many.form(outputs, inputs, bits)),
                }  # fmt: skip
                append(path, [line], setting)
                shown.append(f"{function.__name__} {chain.median_us:.2f} / {alone.median_us:.2f} ({line['error']:.2f})")
            print(f"{outputs} x {inputs}, {bits} bits, {rows} rows: {'   '.join(shown)}", flush=True)
        del stored, packed
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
