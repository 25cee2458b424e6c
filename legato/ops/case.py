"""A `Case`: one set of inputs on which every implementation of an op agrees with its reference, and what it must move.

Owns the shape of a case, how outputs are compared, and the few draws that cases share. Knows no op and no clock.
Each op folder lists its cases in `CASES`; the parity tests, the benchmark and `legato doctor` run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from legato.ops.op import Implementation, Op

Where = Literal["any", "gpu"]


@dataclass(frozen=True)
class Tolerance:
    """|a - b| <= absolute + relative * |b|, elementwise, in float32. Integers and bytes must be equal."""

    relative: float = 0.0
    absolute: float = 0.0


EXACT = Tolerance()
FLOAT32 = Tolerance(1e-5, 1e-5)
BFLOAT16 = Tolerance(2.0**-7, 2.0**-8)


class Draw:
    """Random inputs. Drawn where the generator is and then moved: with one on the CPU every device sees the same numbers."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.generator = generator
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal numbers with standard deviation `scale`."""
        return (torch.randn(shape, generator=self.generator, device=self.generator.device) * scale).to(
            self.device, dtype
        )

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32 uniforms in [low, high)."""
        return (torch.rand(shape, generator=self.generator, device=self.generator.device) * (high - low) + low).to(
            self.device
        )

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers in [low, high)."""
        drawn = torch.randint(low, high, shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.device, dtype)

    def distinct(self, count: int, below: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """`count` different integers in [0, below), in random order."""
        order = torch.randperm(below, generator=self.generator, device=self.generator.device)
        return order[:count].to(self.device, dtype)

    def codes(self, *shape: int) -> Tensor:
        """Random finite e4m3 numbers, subnormals included, small enough for sums to stay tame."""
        return self.normal(*shape, dtype=torch.float8_e4m3fn)

    def listed(self, *values: float, dtype: torch.dtype = torch.int32) -> Tensor:
        """The given numbers."""
        return torch.tensor(values, device=self.device).to(dtype)


def _everything(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs


@dataclass(frozen=True)
class Case:
    """One call of an op.

    `make` returns the positional arguments. `mutates`: indices of the arguments written in place, compared after the
    call beside the return value. `weights`: indices of the arguments that `Op.pack` takes at load. `bytes` and `flops`:
    what the call must move and compute at least, for the roofline.
    `on`: "any", or "gpu" for production shapes that a CPU reference is too slow for. `defined`: (arguments, outputs) ->
    the outputs with whatever the contract leaves open set to one value. `cold`: indices of the arguments that no kernel has
    just written, in a case without weights (a cache); none named: all.
    """

    op: Op[..., Any]
    name: str
    make: Callable[[Draw], tuple[Any, ...]]
    tolerance: Tolerance = FLOAT32
    mutates: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    bytes: int = 0
    flops: int = 0
    on: Where = "any"
    defined: Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[Tensor, ...]] = _everything
    cold: tuple[int, ...] = ()

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Any, ...]:
        """The arguments for `seed`, on `device`; made anew by every call. A production shape, which no CPU sees, is drawn
        on the GPU: gigabytes of it would take minutes elsewhere."""
        device = torch.device(device)
        drawn_on = device if self.on == "gpu" else torch.device("cpu")
        return self.make(Draw(torch.Generator(drawn_on).manual_seed(seed), device))

    def packed(self, implementation: Implementation[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with the weights as the implementation's `pack` makes them; unchanged where it has none."""
        if implementation.pack is None or not self.weights:
            return arguments
        made = implementation.pack(*(arguments[index] for index in self.weights))
        replaced = dict(zip(self.weights, made if isinstance(made, tuple) else (made,), strict=True))
        return tuple(replaced.get(index, argument) for index, argument in enumerate(arguments))

    def outputs(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Run `function` and collect what it made, so far as it is defined: the tensors it returned, then the arguments
        it wrote."""
        made = function(*arguments)
        returned = () if made is None else made if isinstance(made, tuple) else (made,)
        return self.defined(arguments, (*returned, *(arguments[index] for index in self.mutates)))

    def mismatch(self, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str | None:
        """None where every output is within the tolerance, otherwise a line that says which is not and by how much."""
        if len(found) != len(expected):
            return f"{len(found)} outputs, expected {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            problem = difference(ours, theirs, self.tolerance)
            if problem is not None:
                return f"output {index}: {problem}"
        return None


def difference(found: Tensor, expected: Tensor, tolerance: Tolerance) -> str | None:
    """None where the tensors agree within the tolerance (any two NaNs do), otherwise what differs."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.is_floating_point():
        wrong = int((found.to(torch.int64) != expected.to(torch.int64)).sum())
        return f"{wrong} of {expected.numel()} integers differ" if wrong else None
    ours, theirs = found.to(torch.float32), expected.to(torch.float32)
    agree = (ours == theirs) | (ours.isnan() & theirs.isnan())
    error = torch.where(agree, 0.0, (ours - theirs).abs())
    within = error.isfinite() & (error <= tolerance.absolute + tolerance.relative * theirs.abs())
    bad = ~agree & ~within
    if not bool(bad.any()):
        return None
    worst = float(error.nan_to_num(nan=float("inf")).max())
    return f"{int(bad.sum())} of {bad.numel()} values differ, worst by {worst:.3g}"
