"""What works on this machine: software, GPU, and every op's parity and speed here.

Owns the list of checks and what each says to do. Prints nothing and decides no exit code (`legato.cli.doctor`); ops are run by
`legato.bench.ops`.
"""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from legato.bench.ops import Figure, measure_one
from legato.bench.timing import Spread
from legato.engine.start import TARGETS, missing_packages
from legato.ops.case import Case
from legato.ops.catalog import cases
from legato.ops.op import REFERENCE, Implementation, implemented

Verdict = Literal["ok", "note", "fault"]

#: Of a case's inputs that take a moment to draw.
_QUICK_BYTES = 250_000_000
#: NVRTC of other versions is reported to drop writes to distributed shared memory through mixed pointers.
_NVRTC = (13, 0)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` says what to do about anything that is not "ok"."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def fields(self) -> dict[str, str]:
        """As an object of the JSON report."""
        return {"name": self.name, "verdict": self.verdict, "found": self.found, "remedy": self.remedy}


@dataclass(frozen=True)
class OpHealth:
    """One op: which implementation serves it here, whether its cases agree with the reference, and its speed on one of them.

    `wrong`: the cases that do not agree, each with the difference. `timed` is the case that was timed, `spread` None where a
    fault left nothing to time.
    """

    name: str
    implementation: str
    num_cases: int
    wrong: tuple[str, ...]
    timed: Case
    spread: Spread | None
    roofline_percent: float | None

    def fields(self) -> dict[str, Any]:
        """As an object of the JSON report."""
        return {
            "name": self.name,
            "implementation": self.implementation,
            "cases": self.num_cases,
            "wrong": list(self.wrong),
            "timed": self.timed.name,
            "median_us": self.spread.median_us if self.spread else None,
            "roofline_percent": self.roofline_percent,
        }


def machine(device: torch.device) -> Iterator[Finding]:
    """Versions, GPU, and whether kernels can be compiled and kept."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")
    yield Finding("torch", "ok", torch.__version__)
    if device.type != "cuda":
        yield _no_gpu()
        return
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    gpu = f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    if (major, minor) in TARGETS:
        yield Finding("gpu", "ok", gpu)
    else:
        remedy = "Kernels are tested on sm_90 (H100, H200); here the PyTorch references run: right, but slow."
        yield Finding("gpu", "note", gpu, remedy)
    yield from _compiler()
    if not missing_packages():
        yield _cache(importlib.import_module("legato.ops.build").STORE.directory)


def health(device: torch.device, only: Sequence[str] = ()) -> Iterator[OpHealth]:
    """Every op (or those named, alone or by their folder) on its small cases and, on a GPU, on a few of production size, and the
    time of the largest one: enough to find what is broken on a machine in a minute. The GPU tests run every case."""
    target = target_of(device)
    if target is not None:
        implemented(target)
    by_op: dict[str, list[Case]] = {}
    for case in cases():
        if not only or case.op.name in only or case.op.folder in only:
            by_op.setdefault(case.op.name, []).append(case)
    for name, listed in by_op.items():
        small = [case for case in listed if case.on == "any"]
        examined = small + (_few([case for case in listed if case.on != "any"]) if device.type == "cuda" else [])
        if examined:
            yield _health(name, examined, _served_by(examined[0], target), device)


def _few(production: Sequence[Case]) -> list[Case]:
    """The smallest, the middle one and the largest of those whose inputs are quickly drawn."""
    quick = sorted((case for case in production if case.bytes <= _QUICK_BYTES), key=lambda case: case.bytes)
    return [quick[place] for place in sorted({0, len(quick) // 2, len(quick) - 1})] if quick else []


def target_of(device: torch.device) -> str | None:
    """The target whose kernels run on a device; `None`: the references."""
    if device.type != "cuda" or missing_packages():
        return None
    return TARGETS.get(torch.cuda.get_device_capability(device))


def _served_by(case: Case, target: str | None) -> Implementation[..., Any]:
    there: Mapping[str, Implementation[..., Any]] = case.op.implementations
    return there[target if target in there else REFERENCE]  # type: ignore[index]


def _health(
    name: str, listed: Sequence[Case], implementation: Implementation[..., Any], device: torch.device
) -> OpHealth:
    timed = max(listed, key=lambda case: case.bytes)
    wrong = [
        f"{case.name}: {fault}"
        for case in listed
        if case is not timed and (fault := _disagreement(case, implementation, device))
    ]
    figure: Figure = measure_one(timed, implementation, device)
    if figure.fault is not None:
        wrong.append(f"{timed.name}: {figure.fault}")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    percent = figure.fields(gpu)["roofline_percent"]
    return OpHealth(name, implementation.target, len(listed), tuple(wrong), timed, figure.chain, percent)


@torch.inference_mode()
def _disagreement(case: Case, implementation: Implementation[..., Any], device: torch.device) -> str | None:
    """What is wrong with one call; nothing to compare where the reference itself serves."""
    try:
        if implementation.target == REFERENCE:
            case.outputs(implementation.run, case.inputs(device))
            return None
        expected = tuple(made.detach().clone() for made in case.outputs(case.op.reference, case.inputs(device)))
        return case.mismatch(
            case.outputs(implementation.run, case.packed(implementation, case.inputs(device))), expected
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def _no_gpu() -> Finding:
    built = torch.version.cuda
    if built is None:
        remedy = "This PyTorch is built without CUDA. For a GPU install the CUDA build of the same version."
    else:
        remedy = f"PyTorch (CUDA {built}) sees no GPU: is the NVIDIA driver installed (nvidia-smi), is CUDA_VISIBLE_DEVICES set?"
    return Finding("gpu", "note", "none; everything runs on the CPU, in float32", remedy)


def _compiler() -> Iterator[Finding]:
    missing = missing_packages()
    if missing:
        remedy = "pip install 'legato[cuda]': without it the PyTorch references run, which is slow."
        yield Finding("kernels", "fault", f"{', '.join(missing)} not installed", remedy)
        return
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, major, minor = nvrtc.nvrtcVersion()
    found = f"cuda-core {metadata.version('cuda-core')}, NVRTC {major}.{minor}"
    if (major, minor) == _NVRTC:
        yield Finding("kernels", "ok", found)
    else:
        wanted = ".".join(map(str, _NVRTC))
        yield Finding(
            "kernels", "note", found, f"Tested with NVRTC {wanted}: pip install 'nvidia-cuda-nvrtc=={wanted}.*'"
        )


def _cache(folder: Path | None) -> Finding:
    """Whether compiled kernels can be kept."""
    if folder is None:
        return Finding(
            "kernel cache", "note", "none: there is no home directory", "Set HOME, or every start compiles anew."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = f"Make {folder} writable; until then every start compiles anew."
        return Finding("kernel cache", "note", f"{folder}: {error.strerror}", remedy)
    number = sum(1 for _ in folder.glob("*.cubin"))
    return Finding("kernel cache", "ok", f"{folder}, {number} compiled kernels")
