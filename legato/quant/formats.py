"""How each weight format is stored in a checkpoint: suffixes, dtypes and shapes of the parts of one linear layer.

Owns recognising a format from what is there, never from what a configuration claims. Must not know the model or read
data. Called by `legato.model.inventory` (validation), the memory plan and the quantiser.

INT4 assumption: no INT4 release of GLM-5.2 was at hand, so two public layouts are accepted and told apart by names and
dtypes: compressed-tensors (`weight_packed`) and w4afp8 (int8 `weight` with `weight_scale_inv`). Both are symmetric with
groups of 128.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

FLOATS = ("BF16", "F32", "F16")
BLOCK = 128
"""Side of an FP8 block, and length of an INT4 group."""
NVFP4_GROUP = 16


class Format(Enum):
    """A storage format of one linear weight [N, K]."""

    DENSE = "bf16"
    FP8_BLOCK = "fp8"
    NVFP4 = "nvfp4"
    INT4_PACKED = "int4 (compressed-tensors)"
    INT4_NIBBLES = "int4 (w4afp8)"

    @property
    def family(self) -> str:
        """The resident format: both INT4 layouts become one."""
        return self.value.split(" ")[0]


@dataclass(frozen=True)
class Part:
    """One tensor of a stored weight. `optional` parts may be absent; parts that are not `needed` are never read."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
    needed: bool = True


Found = Mapping[str, tuple[str, tuple[int, ...]]]
"""What a checkpoint has for one linear: `{suffix: (dtype, shape)}`, the suffix being what follows the module name and a
dot."""

SUFFIXES = (
    "weight_packed",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "weight",
)
"""Every suffix that belongs to a linear weight in one of the formats, or shows that it is in a format that is not
read."""

UNSUPPORTED = {
    "weight_zero_point": "symmetric INT4 (asymmetric quantisation with zero points is not implemented)",
    "weight_g_idx": "INT4 groups in column order (activation reordering is not implemented)",
    "weight_global_scale": "NVFP4 in ModelOpt naming (weight, weight_scale, weight_scale_2)",
}


def recognise(found: Found) -> Format | None:
    """The format that the parts belong to, from suffixes and the weight's dtype; None where there is no weight at
    all."""
    if "weight_packed" in found:
        return Format.INT4_PACKED
    if "weight" not in found:
        return None
    dtype = found["weight"][0]
    if dtype == "F8_E4M3":
        return Format.FP8_BLOCK
    if dtype == "U8":
        return Format.NVFP4
    if dtype == "I8":
        return Format.INT4_NIBBLES
    return Format.DENSE


def parts(stored: Format, rows: int, columns: int, found: Found) -> tuple[Part, ...]:
    """The parts that a weight [rows, columns] must have in a format.

    `found` only settles spellings that differ between exporters (FP8 scales named `weight_scale`).
    Sources: zai-org/GLM-5.2-FP8 (FP8), nvidia/GLM-5.2-NVFP4 (ModelOpt NVFP4), vllm-project/compressed-tensors
    (pack-quantized), sgl-project/sglang `w4afp8`.
    """
    return _parts(stored, rows, columns, "weight_scale" in found and "weight_scale_inv" not in found)


@lru_cache(maxsize=256)
def _parts(stored: Format, rows: int, columns: int, plain_scale: bool) -> tuple[Part, ...]:
    groups = math.ceil(columns / BLOCK)
    if stored is Format.DENSE:
        return (Part("weight", FLOATS, (rows, columns)),)
    if stored is Format.FP8_BLOCK:
        return (
            Part("weight", ("F8_E4M3",), (rows, columns)),
            Part(
                "weight_scale" if plain_scale else "weight_scale_inv",
                ("F32", "BF16"),
                (math.ceil(rows / BLOCK), groups),
            ),
            Part("input_scale", FLOATS, (), optional=True, needed=False),
        )
    if stored is Format.NVFP4:
        return (
            Part("weight", ("U8",), (rows, columns // 2)),
            Part("weight_scale", ("F8_E4M3",), (rows, columns // NVFP4_GROUP)),
            Part("weight_scale_2", ("F32",), ()),
            Part("input_scale", ("F32",), (), optional=True, needed=False),
        )
    if stored is Format.INT4_PACKED:
        return (
            Part("weight_packed", ("I32",), (rows, columns // 8)),
            Part("weight_scale", FLOATS, (rows, groups)),
            Part("weight_shape", ("I64", "I32"), (2,)),
        )
    return (
        Part("weight", ("I8",), (rows, columns // 2)),
        Part("weight_scale_inv", FLOATS, (rows, groups)),
        Part("input_scale", FLOATS, (), optional=True, needed=False),
    )


def column_multiple(stored: Format) -> int:
    """What the number of columns must be a multiple of."""
    if stored in (Format.DENSE, Format.FP8_BLOCK):
        return 1
    return NVFP4_GROUP if stored is Format.NVFP4 else BLOCK


def resident_bytes(stored: Format, rows: int, columns: int) -> int:
    """Bytes of a weight [rows, columns] on the device when it keeps its format (bf16 for dense, fp32 FP8 scales, bf16
    INT4 scales)."""
    if stored is Format.DENSE:
        return 2 * rows * columns
    if stored is Format.FP8_BLOCK:
        return rows * columns + 4 * math.ceil(rows / BLOCK) * math.ceil(columns / BLOCK)
    if stored is Format.NVFP4:
        return rows * columns // 2 + rows * columns // NVFP4_GROUP + 4
    return rows * columns // 2 + 2 * rows * math.ceil(columns / BLOCK)


def split_multiple(stored: Format, axis: int) -> int:
    """What rows (axis 0) or columns (axis 1) per rank must be a multiple of, so that no block or group straddles two
    ranks."""
    if stored is Format.FP8_BLOCK:
        return BLOCK
    return column_multiple(stored) if axis == 1 else 1


def part_span(stored: Format, suffix: str) -> tuple[int, int] | None:
    """How many rows and columns of the weight one entry of a part stands for; None for a part that describes the whole
    weight and is never split."""
    if suffix in ("weight_scale_2", "weight_shape"):
        return None
    if stored is Format.FP8_BLOCK:
        return (1, 1) if suffix == "weight" else (BLOCK, BLOCK)
    if stored is Format.NVFP4:
        return (1, 2) if suffix == "weight" else (1, NVFP4_GROUP)
    if stored is Format.INT4_PACKED:
        return (1, 8) if suffix == "weight_packed" else (1, BLOCK)
    if stored is Format.INT4_NIBBLES:
        return (1, 2) if suffix == "weight" else (1, BLOCK)
    return (1, 1)
