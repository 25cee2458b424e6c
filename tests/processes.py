"""What tests ask of other processes."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie that only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
