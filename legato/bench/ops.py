"""Every implementation of an op against its roofline, case by case.

Owns the choice of what to time and the order: parity first, then the figure. Times nothing itself (`timing`) and knows
no op by name: cases say what to run and what it must move. Called by `legato bench ops`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from legato.bench.record import floor_us
from legato.bench.timing import COLD_FACTOR, Spread, calls_to_rotate, count_launches, is_cold, time_calls, time_isolated
from legato.ops.case import Case
from legato.ops.catalog import FOLDERS, cases
from legato.ops.op import REFERENCE, Implementation, implemented

#: Targets looked for, in order of preference, where the wish is "best".
TARGETS = ("sm90",)
#: Others that are timed where the wish is "all".
PEERS = ("cublas", "sm90_unfused", "torch_topk", "sm90_clusters", "flash_mla", "sm90_blocks")
BEST, ALL = "best", "all"


class BenchError(ValueError):
    """A benchmark that cannot be run as asked; the message says what there is instead."""


@dataclass(frozen=True)
class Figure:
    """One measured call. `chain`: calls one after the other, as the engine's graph holds them; `isolated`: between
    ordinary kernels. Both are None where `fault` says why the result is wrong or missing. `kernels`: that a call launches,
    where that is known."""

    case: Case
    implementation: str
    chain: Spread | None
    isolated: Spread | None
    num_calls: int
    cold: bool
    fault: str | None
    kernels: int | None = None

    def fields(self, gpu: str | None) -> dict[str, Any]:
        """As one line of a record, without the setting."""
        floor = floor_us(gpu, self.case.bytes, self.case.flops)
        spread = asdict(self.chain) if self.chain else {}
        return {
            "bench": "ops",
            "name": self.case.op.name,
            "implementation": self.implementation,
            "case": described(self.case),
            "median_us": spread.get("median_us"),
            "p20_us": spread.get("p20_us"),
            "p80_us": spread.get("p80_us"),
            "method": spread.get("method"),
            "isolated_us": self.isolated.median_us if self.isolated else None,
            "calls": self.num_calls,
            "kernels": self.kernels,
            "cold": self.cold,
            "bytes": self.case.bytes,
            "flops": self.case.flops,
            "floor_us": floor,
            "roofline_percent": 100 * floor / self.chain.median_us if floor and self.chain else None,
            "correct": self.fault is None,
            "fault": self.fault,
        }


def described(case: Case) -> dict[str, Any]:
    """The words of a case's name as an object: `key=value` words become numbers, the others stand under "is"."""
    words = case.name.removeprefix(case.op.name).split()
    numbers = {key: int(value) for key, _, value in (word.partition("=") for word in words) if value.isdigit()}
    rest = " ".join(word for word in words if not word.partition("=")[2].isdigit())
    return {**numbers, "is": rest} if rest else numbers


def chosen(folders: Sequence[str], pattern: str, device: torch.device) -> list[Case]:
    """The cases of these folders (none named: all) whose name matches a shell pattern and that the device can run.

    Raises BenchError for an unknown folder and where nothing matches.
    """
    unknown = [folder for folder in folders if folder not in FOLDERS]
    if unknown:
        raise BenchError(f"no folder of ops is called {unknown[0]!r}; there are {', '.join(FOLDERS)}")
    matching = [
        case
        for case in cases()
        if (not folders or case.op.folder in folders)
        and (fnmatch.fnmatch(case.name, pattern) or fnmatch.fnmatch(case.op.name, pattern))
    ]
    able = [case for case in matching if case.on == "any" or device.type == "cuda"]
    if not matching:
        raise BenchError(f"no case matches {pattern!r} in {', '.join(folders or FOLDERS)}")
    if not able:
        raise BenchError(f"all {len(matching)} cases that match are production shapes, which need a GPU")
    return able


def measure(listed: Sequence[Case], wish: str, device: torch.device) -> Iterator[Figure]:
    """Times cases one by one, as the iterator is read.

    `wish`: implementations' names with commas between them, "best" (the first of `TARGETS`, else the reference) or "all".
    Raises BenchError where no listed case has any of the implementations.
    """
    pairs = [(case, implementation) for case in listed for implementation in _implementations(case, wish, device)]
    if not pairs:
        raise BenchError(f"none of the {len(listed)} cases has an implementation {wish!r}")
    return (measure_one(case, implementation, device) for case, implementation in pairs)


def measure_one(case: Case, implementation: Implementation[..., Any], device: torch.device) -> Figure:
    """Parity of a first call, then times, then parity of what the timed calls left."""
    with torch.inference_mode():
        expected = tuple(
            made.detach().clone() for made in case.outputs(case.op.reference, case.inputs(device))
        )  # fmt: skip
        num_calls = calls_to_rotate(device, case.bytes)
        cold = is_cold(device, case.bytes, num_calls)
        try:
            first = case.outputs(implementation.run, case.packed(implementation, case.inputs(device)))
            fault = case.mismatch(first, expected)
            if fault is not None:
                return Figure(case, implementation.target, None, None, num_calls, cold, fault)
            calls = _rotated(case, implementation, num_calls, device)
            chain, results = time_calls(calls, device)
            captured = device.type == "cuda" and chain.method == "graph"
            isolated = time_isolated(calls, device) if captured else None
            kernels = count_launches(calls[0]) if captured else None
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return Figure(case, implementation.target, None, None, num_calls, cold, f"{type(error).__name__}: {error}")
        fault = _fault_of_timed(case, case.inputs(device), results, expected)
    if fault is not None:
        return Figure(case, implementation.target, None, None, num_calls, cold, fault)
    return Figure(case, implementation.target, chain, isolated, num_calls, cold, None, kernels)


def _implementations(case: Case, wish: str, device: torch.device) -> list[Implementation[..., Any]]:
    if device.type == "cuda":
        for target in (*TARGETS, *(PEERS if wish == ALL else ())):
            implemented(target)
    there = case.op.implementations
    if wish == ALL:
        return list(there.values())
    if wish == BEST:
        return [there[next((target for target in TARGETS if target in there), REFERENCE)]]
    for name in (names := wish.split(",")):
        if name not in there:
            implemented(name)
    return [there[name] for name in names if name in there]


def _rotated(
    case: Case, implementation: Implementation[..., Any], num_calls: int, device: torch.device
) -> list[Callable[[], object]]:
    """Calls on copies of one set of inputs: drawing each set anew would take long. Where a case has weights, or says what
    is cold, only that is copied: activations are in the L2 when a kernel of the engine reads them, since the one before
    wrote them."""
    arguments = case.packed(implementation, case.inputs(device))
    copied = case.weights or case.cold or range(len(arguments))
    wanted = min(num_calls, _copies_that_fit(case, [arguments[index] for index in copied], device))

    def own() -> tuple[Any, ...]:
        return tuple(_copy(value) if index in copied else value for index, value in enumerate(arguments))

    def call(owned: tuple[Any, ...]) -> Callable[[], object]:
        return lambda: implementation.run(*owned)

    sets = [own() for _ in range(wanted)]
    return [call(sets[number % wanted]) for number in range(num_calls)]


def _copies_that_fit(case: Case, values: Sequence[Any], device: torch.device) -> int:
    """How many copies half of the free memory holds, but never so few that what a call reads is still in the L2 when its turn
    comes again."""
    if device.type != "cuda":
        return 1
    size = sum(tensor.nbytes for value in values for tensor in _tensors(value))
    free = torch.cuda.mem_get_info(device)[0] // 2
    cold = math.ceil(COLD_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size / max(case.bytes, 1))
    return max(cold, free // max(size, 1), 1)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """What `_copy` makes anew: a weight may be kept in several forms."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))


def _copy(value: Any) -> Any:
    """Tensors, and tuples and dataclasses of them, in memory of their own."""
    if isinstance(value, tuple):
        return tuple(_copy(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: _copy(getattr(value, part.name)) for part in fields(value)})
    return value.clone() if isinstance(value, torch.Tensor) else value


def _fault_of_timed(
    case: Case, arguments: tuple[Any, ...], results: Sequence[object], expected: tuple[torch.Tensor, ...]
) -> str | None:
    """What is wrong with the results of the timed calls. Cases that write their arguments were written over and over:
    only their first call can be checked."""
    if case.mutates:
        return None
    for made in (results[0], results[-1]):
        returned = made if isinstance(made, tuple) else (made,)
        tensors = case.defined(arguments, tuple(value for value in returned if isinstance(value, torch.Tensor)))
        fault = case.mismatch(tensors, expected)
        if fault is not None:
            return f"in the timed run: {fault}"
    return None
