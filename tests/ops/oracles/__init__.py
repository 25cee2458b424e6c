"""A second account of every op: float64, written for clarity, sharing no code with the references.

Importing this registers all of them in `ORACLES`, by the names of the ops.
"""

from tests.ops.oracles import cache, gemm, iteration, layers, pointwise, selection
from tests.ops.oracles.registry import ORACLES

__all__ = ["ORACLES", "cache", "gemm", "iteration", "layers", "pointwise", "selection"]
