"""What tests ask of other processes, which may end while they are asked."""

import contextlib
import resource
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that has ended does not, whether or not its parent has collected it yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or between that and the reading
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """Processes that any thread of a process has started and that have not been collected."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (task / "children").read_text().split())
    return children


def family_of(pid: int) -> list[int]:
    """A process and everything below it, parents first."""
    found = [pid]
    for member in found:
        found += children_of(member)
    return found


def find(pids: list[int], words: str) -> int:
    """The one process among them that was started with these words."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if words in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    (only,) = found
    return only


def processor_seconds_of_children() -> float:
    """Of children of this process that have ended: time of the clock says nothing on a machine that others use."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
