"""What is wrong with a checkpoint, said so that its owner can act.

Owns the one exception family of loading. Must not know where files come from or what tensors mean. Raised by everything
in `legato.model` that touches a checkpoint, caught by the command line and the tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault of a checkpoint: where (file, tensor), what was expected, what was found, what to do about it."""

    file: str
    tensor: str
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return f"{where}: expected {self.expected}, found {self.found}. {self.remedy}"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. `problems` lists every fault found; nothing has been loaded when it is
    raised."""

    SHOWN = 8

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        lines = [str(problem) for problem in self.problems[: self.SHOWN]]
        if len(self.problems) > self.SHOWN:
            lines.append(f"... and {len(self.problems) - self.SHOWN} more faults of this checkpoint")
        super().__init__("\n".join(lines))
