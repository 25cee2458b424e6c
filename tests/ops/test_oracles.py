"""Every reference against a second account of the same op (`oracles`), in float64.

Ops whose result is a choice (top_k, verify, slots, bytes) are compared exactly. Every case that a CPU can run is used,
with memory that is NaN until it is written.
"""

import pytest

from legato.ops.case import Case, difference
from legato.ops.catalog import cases
from tests.ops.oracles import ORACLES


@pytest.mark.parametrize("case", [case for case in cases() if case.on == "any"], ids=lambda case: case.name)
def test_reference_agrees_with_float64(case: Case, uninitialised_is_nan: None) -> None:
    expected = ORACLES[case.op.name](*case.inputs())
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = case.outputs(case.op.reference, case.inputs())
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_floating_point() == theirs.is_floating_point()
        problem = difference(ours, theirs, case.tolerance)
        assert problem is None, problem


def test_every_op_has_an_oracle() -> None:
    assert {case.op.name for case in cases()} == set(ORACLES)
