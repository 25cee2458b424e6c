"""Every implementation of an op agrees with its reference on every case. The tests are made from the cases."""

import pytest
import torch

from legato.ops.case import EXACT, Case, Tolerance
from legato.ops.catalog import cases
from legato.ops.op import REFERENCE, implemented, registered

TARGETS = ("sm90",)


def _attached() -> list[tuple[Case, str]]:
    """(case, target) for every implementation there is; nothing where there is no GPU to run it."""
    if not torch.cuda.is_available():
        return []
    return [(case, target) for target in TARGETS for case in cases() if case.op in implemented(target)]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "target"), _attached(), ids=lambda value: getattr(value, "name", value))
def test_implementation_agrees_with_its_reference(case: Case, target: str, uninitialised_is_nan: None) -> None:
    for seed in (0, 1):
        expected = case.outputs(case.op.reference, case.inputs("cuda", seed))
        implementation = case.op.implementations[target]
        found = case.outputs(implementation.run, case.packed(implementation, case.inputs("cuda", seed)))
        assert case.mismatch(found, expected) is None, f"seed {seed}: {case.mismatch(found, expected)}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [case for case in cases() if case.on == "any"], ids=lambda case: case.name)
def test_reference_on_a_gpu_agrees_with_the_cpu(case: Case) -> None:
    found = case.outputs(case.op.reference, case.inputs("cuda"))
    assert case.mismatch(found, case.outputs(case.op.reference, case.inputs("cpu"))) is None


def _packing() -> list[Case]:
    return [case for case in cases() if case.on == "any" and case.op.implementations[REFERENCE].pack is not None]


@pytest.mark.parametrize("case", _packing(), ids=lambda case: case.name)
def test_a_reference_reads_what_it_packs(case: Case) -> None:
    reference = case.op.implementations[REFERENCE]
    found = case.outputs(reference.run, case.packed(reference, case.inputs()))
    assert case.mismatch(found, case.outputs(reference.run, case.inputs())) is None


def test_every_op_has_a_case_and_names_are_unique() -> None:
    listed = cases()
    assert {case.op.name for case in listed} == {declared.name for declared in registered()}
    assert len({case.name for case in listed}) == len(listed)


def test_cases_are_reproducible() -> None:
    for case in {case.op.name: case for case in cases() if case.on == "any"}.values():
        first, again = case.inputs(seed=3), case.inputs(seed=3)
        assert all(
            torch.equal(torch.nan_to_num(a.float()), torch.nan_to_num(b.float()))
            for a, b in zip(first, again, strict=True)
            if isinstance(a, torch.Tensor)
        )


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "agrees"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), EXACT, True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), EXACT, False),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), Tolerance(1.0, 1e9), False),
        (torch.tensor([float("-inf")]), torch.tensor([float("-inf")]), EXACT, True),
        (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), Tolerance(1.0, 1.0), False),
        (torch.tensor([1.01]), torch.tensor([1.0]), Tolerance(0.02), True),
        (torch.tensor([1.03]), torch.tensor([1.0]), Tolerance(0.02), False),
        (torch.tensor([3]), torch.tensor([4]), Tolerance(1.0, 10.0), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), Tolerance(1.0, 1.0), False),
    ],
)
def test_what_counts_as_agreement(found, expected, tolerance, agrees) -> None:
    case = Case(cases()[0].op, "", lambda draw: (), tolerance)
    assert (case.mismatch((found,), (expected,)) is None) == agrees
