"""A `Case`: one set of inputs on which every implementation of an op must agree with its reference, and what moving it
costs.

Owns the shape of a case and how outputs are compared. Knows no op and no clock.
Each op folder lists its cases in `CASES`; the parity tests, the benchmark and `legato doctor` run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.ops.op import Op


@dataclass(frozen=True)
class Tolerance:
    """|a - b| <= absolute + relative * |b|, elementwise, after both are cast to float32. Integers and bytes must always
    be equal."""

    relative: float = 0.0
    absolute: float = 0.0


EXACT = Tolerance()


@dataclass(frozen=True)
class Case:
    """One call of an op.

    `make(generator, device)` returns the positional arguments; tensors are drawn from the CPU `generator` and then
    moved, so that every device sees the same numbers. `mutates`: indices of arguments written in place, compared after
    the call beside the return value. `bytes` and `flops`: what the call must move and compute at least, for the
    roofline.
    """

    op: Op[..., Any]
    name: str
    make: Callable[[torch.Generator, torch.device], tuple[Any, ...]]
    tolerance: Tolerance = Tolerance(1e-5, 1e-5)
    mutates: tuple[int, ...] = ()
    bytes: int = 0
    flops: int = 0

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        """The arguments for `seed`, on `device`."""
        return self.make(torch.Generator().manual_seed(seed), device)

    def outputs(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Run `function` and collect all it made: its tensors, then the arguments it wrote. `arguments` are not reused
        by the caller."""
        made = function(*arguments)
        returned = () if made is None else made if isinstance(made, tuple) else (made,)
        return (*returned, *(arguments[index] for index in self.mutates))

    def mismatch(self, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str | None:
        """None where every output agrees within the tolerance, otherwise one line that says which does not and by how
        much."""
        if len(found) != len(expected):
            return f"{len(found)} outputs, expected {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            problem = _difference(ours, theirs, self.tolerance)
            if problem is not None:
                return f"output {index}: {problem}"
        return None


def _difference(found: Tensor, expected: Tensor, tolerance: Tolerance) -> str | None:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.is_floating_point():
        wrong = int((found.to(torch.int64) != expected.to(torch.int64)).sum())
        return f"{wrong} of {expected.numel()} integers differ" if wrong else None
    ours, theirs = found.to(torch.float32), expected.to(torch.float32)
    agree = (ours == theirs) | (ours.isnan() & theirs.isnan())
    error = torch.where(agree, 0.0, (ours - theirs).abs())
    bound = tolerance.absolute + tolerance.relative * theirs.abs()
    bad = ~agree & ~(error <= bound)
    if not bool(bad.any()):
        return None
    worst = float(error.nan_to_num(nan=float("inf")).max())
    return f"{int(bad.sum())} of {bad.numel()} values differ, worst by {worst:.3g}"
