"""How many kernels this process has compiled: a server that is ready compiles none.

Owns the count over all compilers in use. Imports no compiler: where none was imported, nothing was compiled. Called by the
engine's warm-up and by benchmarks.
"""

from __future__ import annotations

import sys


def compilations() -> int:
    """Kernels compiled by NVRTC since the process started; those read from the cache on disk do not count."""
    build = sys.modules.get("legato.ops.build")
    return 0 if build is None else build.STORE.compilations
