"""One parity case of an implementation on the emulator.

Owns the comparison with the reference. Called by the command and by the sweep's test.
"""

from __future__ import annotations

import torch

from legato.ops.case import Case
from tests.emulator.launch import EmulationError, emulated


def outcome(case: Case, target: str, seed: int) -> tuple[str | None, list[tuple[str, int, int]]]:
    """What differs from the reference, or what went wrong (None: nothing), and what was launched."""
    implementation = case.op.implementations[target]
    expected = case.outputs(case.op.reference, case.inputs("cpu", seed))
    with torch.inference_mode(), emulated(seed) as emulation:
        try:
            found = case.outputs(implementation.run, case.packed(implementation, case.inputs("cpu", seed)))
        except EmulationError as error:
            return str(error), emulation.launched
    return case.mismatch(found, expected), emulation.launched
