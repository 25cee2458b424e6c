"""All launches of a decode iteration, weights only, in one CUDA graph: what memory and launches alone must cost.

Owns the graph and its timing; the list of launches is arithmetic (`launches`), the kernel is the bound `linear_bf16`.
Called by `legato bench skeleton`. Every launch depends on the one before it and streams as many bytes of weights as the
iteration's real launch must, from memory of its own (the MTP steps of an iteration read the same weights again, as they
do). Launches that read no weights are given 128 KB, so that each is a real launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from legato.bench.launches import Launch
from legato.bench.record import against_floor
from legato.bench.timing import Spread, sample_graph
from legato.ops.gemm import linear_bf16
from legato.ops.op import Implementation, implemented

#: Outputs and inputs of a launch that has no weights.
_NO_WEIGHTS = (256, 256)
_STRIP, _BLOCK = 16, 32


class SkeletonError(ValueError):
    """The machine cannot run the skeleton; the message says what is missing."""


@dataclass(frozen=True)
class Figure:
    """The whole graph: time per replay in microseconds, host time to launch it, and what it had to read."""

    spread: Spread
    host_us: float
    num_launches: int
    weight_bytes: int

    def fields(self, gpu: str | None, case: dict[str, Any]) -> dict[str, Any]:
        """As one line of a record, without the setting."""
        return {
            "bench": "skeleton",
            "name": "iteration",
            "implementation": "sm90",
            "case": case,
            **self.spread.fields,
            "host_us": self.host_us,
            "launches": self.num_launches,
            **against_floor(self.spread.median_us, self.weight_bytes, gpu),
            "correct": True,
        }


def streamed_shape(launch: Launch) -> tuple[int, int]:
    """Outputs and inputs of a bfloat16 weight of as many bytes (within one strip of 16 outputs) as the launch reads.

    A plain product keeps its shape. The experts, which are one small matrix after the other, are one of 2048
    inputs with as many outputs as make the bytes equal.
    """
    if not launch.weight_bytes:
        return _NO_WEIGHTS
    inputs = 2048 if launch.name == "experts" else -(-launch.inputs // _BLOCK) * _BLOCK
    strips = max(1, round(launch.weight_bytes / (2 * inputs * _STRIP)))
    return strips * _STRIP, inputs


def measure(launches: Sequence[Launch], device: torch.device) -> Figure:
    """Builds the graph, checks one launch of every shape against cuBLAS, and times replays.

    Raises SkeletonError without a GPU that has the kernel, and where a result is wrong.
    """
    if device.type != "cuda" or linear_bf16 not in implemented("sm90"):
        raise SkeletonError("the skeleton streams weights with the sm90 kernels: it needs an H100 or H200")
    linear = linear_bf16.implementations["sm90"]
    with torch.inference_mode():
        _check(launches, linear, device)
        calls, streamed = _calls(launches, linear, device)
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        samples = sample_graph(graph, device)
        host_us = _host_us(graph, device)
    return Figure(Spread.of(samples, "graph"), host_us, len(calls), streamed)


def _check(launches: Sequence[Launch], linear: Implementation[..., Tensor], device: torch.device) -> None:
    for (outputs, inputs), rows in sorted({(streamed_shape(launch), launch.rows) for launch in launches}):
        x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        packed = weight if linear.pack is None else linear.pack(weight)
        found, expected = linear.run(x, packed), torch.nn.functional.linear(x, weight)
        if not torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2 * inputs**0.5):
            raise SkeletonError(f"the kernel is wrong for {rows} rows of a weight [{outputs}, {inputs}]")


def _calls(
    launches: Sequence[Launch], linear: Implementation[..., Tensor], device: torch.device
) -> tuple[list[Callable[[], object]], int]:
    """One call per launch, and the bytes of weights that all of them read."""
    steps, streamed = list(_places(launches)), 0
    size = max(place + outputs * inputs for place, outputs, inputs in steps)
    memory = torch.empty(size, device=device, dtype=torch.bfloat16).normal_(std=0.02)
    rows = {inputs: torch.randn(16, inputs, device=device).bfloat16() for _, _, inputs in steps}
    packed = {shape: _packed_form(linear, shape) for shape in {(outputs, inputs) for _, outputs, inputs in steps}}
    calls: list[Callable[[], object]] = []
    for launch, (place, outputs, inputs) in zip(launches, steps):
        weight, x = memory[place : place + outputs * inputs].view(outputs, inputs), rows[inputs][: launch.rows]
        # Random numbers are as good in one order as in another: the memory is used as if it had been packed.
        kept = _in_form(packed[outputs, inputs], weight)
        calls.append(lambda x=x, kept=kept: linear.run(x, kept))
        streamed += weight.nbytes
    return calls, streamed


def _packed_form(linear: Implementation[..., Tensor], shape: tuple[int, int]) -> Any:
    """What the implementation's `pack` makes of a weight of this shape, without contents; it computes nothing."""
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return weight if linear.pack is None else linear.pack(weight)


def _in_form(form: Any, weight: Tensor) -> Any:
    """The weight's memory in such a form: a tensor, or several beside one another of which a call reads one."""
    if isinstance(form, Tensor):
        return weight.view(form.shape)
    return replace(form, **{part.name: weight.view(getattr(form, part.name).shape) for part in fields(form)})


def _places(launches: Sequence[Launch]) -> Iterator[tuple[int, int, int]]:
    """Where each launch's weight begins, with its outputs and inputs. The k-th launch of a name in any step of the MTP
    layer reads the weight of the k-th in the first such step."""
    end = 0
    within_step: dict[tuple[int, tuple[int, int]], int] = {}
    position, in_mtp = 0, False
    for launch in launches:
        if launch.name == "mtp_inputs":
            position, in_mtp = 0, True
        outputs, inputs = streamed_shape(launch)
        key = (position, (outputs, inputs))
        place = within_step.get(key) if in_mtp else None
        if place is None:
            place, end = end, end + outputs * inputs
            if in_mtp:
                within_step[key] = place
        position += 1
        yield place, outputs, inputs


def _host_us(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    """Host time of one launch of the graph while the device is idle: the median of 20."""
    times: list[float] = []
    for _ in range(20):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        graph.replay()
        times.append(1e6 * (time.perf_counter() - began))
    torch.cuda.synchronize(device)
    return sorted(times)[len(times) // 2]
