"""Weight formats: what a weight can do (`Weight`, `Experts`), the formats that do it, and the quantisers.

Owns the names below. Must not know the model, names of tensors or files. Called by `legato.model`.
"""

from legato.quant.dense import DenseExperts, DenseWeight
from legato.quant.formats import Format
from legato.quant.fp8_block import Fp8BlockExperts, Fp8BlockWeight, quantize_fp8_block
from legato.quant.int4 import Int4Experts, Int4Weight, quantize_int4
from legato.quant.join import StackedWeight, concatenate
from legato.quant.nvfp4 import Nvfp4Experts, Nvfp4Weight, quantize_nvfp4
from legato.quant.stored import build, collect
from legato.quant.weight import Experts, Weight

__all__ = [
    "DenseExperts",
    "DenseWeight",
    "Experts",
    "Format",
    "Fp8BlockExperts",
    "Fp8BlockWeight",
    "Int4Experts",
    "Int4Weight",
    "Nvfp4Experts",
    "Nvfp4Weight",
    "StackedWeight",
    "Weight",
    "build",
    "collect",
    "concatenate",
    "quantize_fp8_block",
    "quantize_int4",
    "quantize_nvfp4",
]
