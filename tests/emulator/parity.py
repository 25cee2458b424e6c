"""One parity case of an implementation on the emulator.

Owns how a case's CPU inputs are made what a GPU would get. Called by the command and by the sweep's test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from legato.ops.case import Case
from tests.emulator.launch import EmulationError, emulated


def outcome(case: Case, target: str, seed: int) -> tuple[str | None, list[tuple[str, int, int]]]:
    """What differs from the reference, or what went wrong (None: nothing), and what was launched."""
    implementation = case.op.implementations[target]
    expected = case.outputs(case.op.reference, case.inputs("cpu", seed))
    arguments = tuple(map(_dense, case.inputs("cpu", seed)))
    with torch.inference_mode(), emulated(seed) as emulation:
        try:
            found = case.outputs(implementation.run, case.packed(implementation, arguments))
        except EmulationError as error:
            return str(error), emulation.launched
    return case.mismatch(found, expected), emulation.launched


def _dense(value: Any) -> Any:
    """What the references make on a CPU in padded rows (angles), they make without gaps on a GPU."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return dataclasses.replace(
        value,
        **{
            name: one.contiguous()
            for name, one in fields.items()
            if isinstance(one, Tensor) and not one.is_contiguous()
        },
    )
