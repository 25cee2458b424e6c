"""Memory of a process over a long run, and by how much it has grown.

Owns the reading and the judgement. Knows nothing of what the process does. Called by the soaks.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path


def resident_mib(pid: int | None = None) -> float:
    """Memory of a process (by default this one) that is in use, in MiB. Raises OSError where there is no such process."""
    pages = int(Path(f"/proc/{'self' if pid is None else pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(slots=True)
class Growth:
    """Readings over time."""

    readings: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])

    def note(self, seconds: float, mib: float) -> None:
        """A reading, so many seconds after the start."""
        self.readings.append((seconds, mib))

    @property
    def last_mib(self) -> float:
        """The newest reading; 0 before the first."""
        return self.readings[-1][1] if self.readings else 0.0

    def mib(self, end: float) -> float:
        """Most memory in the last fifth of the time until `end`, less the most in the first fifth."""
        first = [mib for seconds, mib in self.readings if seconds <= end / 5]
        last = [mib for seconds, mib in self.readings if seconds >= end * 4 / 5]
        return max(last) - max(first) if first and last else 0.0
