"""How long a collective takes, alone and in an iteration's company: one process per GPU, the slowest rank counts.

Owns the rank processes and the summary of what they print. Times nothing itself (`collective_rank`). Called by
`legato bench ops reduce --ranks N`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from legato.bench.ops import BenchError

_SECONDS = 240.0


@dataclass(frozen=True)
class Collective:
    """One measured collective: microseconds that it takes ("alone") or adds to a chain. `width` of a rank's rows."""

    op: str
    width: int
    where: str
    implementation: str
    rows: int
    num_ranks: int
    median_us: float
    p20_us: float
    p80_us: float
    p99_us: float
    num_samples: int
    chain_us: float | None
    fault: str | None

    def fields(self) -> dict[str, Any]:
        """As one line of a record, without the setting."""
        return {
            "bench": "ops",
            "name": self.op,
            "implementation": self.implementation,
            "case": {"rows": self.rows, "width": self.width, "ranks": self.num_ranks, "where": self.where},
            "median_us": self.median_us,
            "p20_us": self.p20_us,
            "p80_us": self.p80_us,
            "p99_us": self.p99_us,
            "samples": self.num_samples,
            "chain_us": self.chain_us,
            "bytes": self.rows * self.width * 2,
            "correct": self.fault is None,
            "fault": self.fault,
        }


def measure_ranks(num_ranks: int) -> list[Collective]:
    """Runs `num_ranks` ranks on as many GPUs of this host.

    Raises BenchError where there are too few GPUs, or a rank fails: the message ends with what it printed last.
    """
    if not 2 <= num_ranks <= torch.cuda.device_count():
        raise BenchError(
            f"--ranks {num_ranks}: this machine has {torch.cuda.device_count()} GPUs; two ranks are the least"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = [sys.executable, "-m", "legato.bench.collective_rank"]
    printed = outputs([[*here, str(rank), str(num_ranks), str(port)] for rank in range(num_ranks)], _SECONDS)
    return slowest([[json.loads(line) for line in lines.splitlines()] for lines in printed])


def outputs(commands: Sequence[Sequence[str]], seconds: float) -> list[str]:
    """What each command prints; they run at once and may wait for each other, so each is read while it runs.

    Raises BenchError where one fails or is not done after `seconds`; none outlives the call.
    """
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        with ThreadPoolExecutor(len(ranks)) as readers:
            printed = list(readers.map(_read_whole, ranks, repeat(seconds)))
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"a rank was not done after {seconds:.0f} s") from error
    for number, (rank, (_, errors)) in enumerate(zip(ranks, printed, strict=True)):
        if rank.returncode:
            raise BenchError(f"rank {number} failed: {errors.strip()[-600:]}")
    return [lines for lines, _ in printed]


def _read_whole(rank: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    try:
        return rank.communicate(timeout=seconds)
    finally:
        rank.kill()


def slowest(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[Collective]:
    """For each figure that all ranks printed, in the same order: sample by sample, the slowest rank's."""
    made: list[Collective] = []
    for figures in zip(*ranks, strict=True):
        samples = sorted(max(together) for together in zip(*(figure["samples"] for figure in figures), strict=True))
        last = len(samples) - 1
        median, p20, p80, p99 = (samples[round(last * share)] for share in (0.5, 0.2, 0.8, 0.99))
        first = figures[0]
        made.append(
            Collective(
                op=first["op"],
                width=first["width"],
                where=first["where"],
                implementation=first["implementation"],
                rows=first["rows"],
                num_ranks=len(figures),
                median_us=median,
                p20_us=p20,
                p80_us=p80,
                p99_us=p99,
                num_samples=len(samples),
                chain_us=first.get("chain_us"),
                fault=next((figure["fault"] for figure in figures if figure["fault"]), None),
            )
        )
    return made
