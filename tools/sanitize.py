"""Runs the small cases of every op with Hopper kernels under NVIDIA's compute-sanitizer: memory accesses, then races.

    python tools/sanitize.py                              # memcheck and racecheck, all ops
    python tools/sanitize.py --tool memcheck select score # one tool, two folders of legato/ops

Owns the call of the sanitizer and what it says in the end; the cases are those of the parity tests that a CPU sees too
(`on == "any"`). Needs a GPU and `compute-sanitizer` on the PATH. Ends with 1 where an access or a race was reported, a
case failed, or a tool ran past its time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from legato.ops.catalog import cases
from legato.ops.op import implemented

TOOLS = ("memcheck", "racecheck")
#: In the environment of the process that the sanitizer watches.
_INSIDE = "LEGATO_SANITIZED"
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
ROOT = Path(__file__).resolve().parent.parent


def watched(folders: Sequence[str], most: int) -> int:
    """Runs the cases once, in the watched process. Returns how many of them failed to run or disagreed."""
    attached = {declared.name for declared in implemented("sm90")}
    chosen = [
        case
        for case in cases()
        if case.on == "any" and case.op.name in attached and (not folders or case.op.folder in folders)
    ]
    failed = 0
    with torch.inference_mode():
        for name, of_one in itertools.groupby(chosen, lambda case: case.op.name):
            began, ran = time.perf_counter(), 0
            listed = list(of_one)
            for case in listed[:: max(1, len(listed) // most)]:
                implementation = case.op.implementations["sm90"]
                # On the CPU: the tool would watch every kernel of PyTorch's too, which takes most of the time.
                expected = case.outputs(case.op.reference, case.inputs("cpu"))
                found = case.outputs(implementation.run, case.packed(implementation, case.inputs("cuda")))
                torch.cuda.synchronize()
                fault = case.mismatch(found, expected)
                if fault is not None:
                    failed += 1
                    print(f"WRONG {case.name}: {fault}", flush=True)
                ran += 1
            print(f"ran {name}: {ran} of {len(listed)} cases, {time.perf_counter() - began:.1f} s", flush=True)
    return failed


def sanitized(tool: str, folders: Sequence[str], most: int, seconds: float) -> bool:
    """One tool over the cases, in a process of its own. Prints what it prints; True where nothing was found."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    command += ["--print-limit", "20", sys.executable, __file__, "--most", str(most), *folders]
    environment = {**os.environ, _INSIDE: "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as stopped:
        shown = stopped.stdout.decode(errors="replace") if isinstance(stopped.stdout, bytes) else stopped.stdout or ""
        print(shown, f"{tool}: stopped after {seconds:.0f} s", sep="\n")
        return False
    print(done.stdout)
    counts = [int(first or second) for first, second in _SUMMARY.findall(done.stdout)]
    good = done.returncode == 0 and bool(counts) and not any(counts)
    found = "nothing found" if good else f"exit {done.returncode}, reported {counts}"
    print(f"{tool}: {found}, {time.perf_counter() - began:.0f} s")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="folders of legato/ops; all of them without any")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="memcheck or racecheck; both without it")
    parser.add_argument(
        "--most", type=int, default=1000, help="about so many cases of an op at most, spread over its list"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for each tool")
    given = parser.parse_args()
    if os.environ.get(_INSIDE):
        return 1 if watched(given.folders, given.most) else 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    good = [sanitized(tool, given.folders, given.most, given.seconds) for tool in given.tool or TOOLS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
