# pyright: basic
"""The best output of each row inside the product, on Hopper: a choice by name, `--op linear_bf16_best=argmax_sm90`.

Owns which functions of `sm90.py` those are. Not a target of its own: what is bound where nothing is said, the choice behind the
plain product, is as fast in an iteration and serves any number of rows. Imported by `bind` when asked for.
"""

from __future__ import annotations

from legato.ops.gemm import linear_bf16_best, linear_fp8_block_best
from legato.ops.gemm.sm90 import pack_bf16, pack_fp8, run_bf16_best, run_fp8_best

linear_bf16_best.on("argmax_sm90", pack=pack_bf16)(run_bf16_best)
linear_fp8_block_best.on("argmax_sm90", pack=pack_fp8)(run_fp8_best)
