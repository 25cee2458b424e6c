"""The bond of a process to the one that started it: it does not outlive it.

Owns one function and imports nothing of ours. Called by the engine's process and by those of its other ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ends this process when its parent ends, however that happens (elsewhere than on Linux the closed socket does it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
