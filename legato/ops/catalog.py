"""Every case of every op, in reading order.

Owns the list of folders. Called by the parity tests, the benchmark of ops and `legato doctor`.
"""

from __future__ import annotations

import importlib

from legato.ops.case import Case

FOLDERS = ("pointwise", "gemm", "cache", "prologue", "score", "select", "attend", "experts", "sample", "rows", "reduce")


def cases() -> tuple[Case, ...]:
    """All cases, folder by folder."""
    folders = (importlib.import_module(f"{__package__}.{folder}") for folder in FOLDERS)
    return tuple(case for folder in folders for case in folder.CASES)
