"""Runs parity cases of kernels on the CPU, from the command line: `python -m tests.emulator "top_k rows=6" --seeds 4`.

Owns the command. Knows no kernel: the cases are the catalog's. For people who write kernels.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from legato.ops.catalog import cases
from legato.ops.op import implemented

if sys.platform != "linux":
    sys.exit("the emulator runs on Linux")

from tests.emulator.parity import outcome


def main() -> None:
    """Prints a line for each case and seed; exits with 1 where one differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator", description="Parity cases of kernels, on the CPU."
    )
    parser.add_argument("names", nargs="*", help="parts of cases' names, or names of ops; none: every case for CPUs")
    parser.add_argument(
        "--seeds", type=int, default=2, help="how many interleavings: 0 in order, 1 with late copies, then drawn"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--target", default="sm90", help="the implementation")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    served = implemented(asked.target)
    chosen = [
        case
        for case in cases()
        if case.op in served
        and (
            any(name in case.name or name == case.op.name for name in asked.names)
            or (not asked.names and case.on == "any")
        )
    ]
    wrong = 0
    for case in chosen:
        if asked.list:
            print(case.name, f"({case.on})")
            continue
        for seed in range(asked.first, asked.first + asked.seeds):
            began = time.monotonic()
            problem, launched = outcome(case, asked.target, seed)
            wrong += problem is not None
            said = "agrees" if problem is None else f"DIFFERS: {problem}"
            kernels = ", ".join(f"{name} {instructions:,}" for name, instructions, _ in launched) or "no kernel"
            print(f"{case.name}, seed {seed}: {said} ({time.monotonic() - began:.1f} s; {kernels})", flush=True)
    sys.exit(1 if wrong or not chosen else 0)


if __name__ == "__main__":
    main()
