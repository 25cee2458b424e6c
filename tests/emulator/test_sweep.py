"""Parity of the kernels without a GPU: a few cases of every kind, and all that a CPU can draw, each in several orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import top_k
from legato.ops.case import Case, Draw
from legato.ops.catalog import cases
from legato.ops.op import implemented
from legato.ops.select import sm90
from tests.emulator.launch import emulated
from tests.emulator.native import compiler
from tests.emulator.parity import outcome

# The machine is compiled and every kernel translated first, which takes longer than a quick test may.
pytestmark = [pytest.mark.full, pytest.mark.skipif(compiler() is None, reason="needs g++")]


def served() -> list[Case]:
    with_kernels = implemented("sm90")
    return [case for case in cases() if case.on == "any" and case.op in with_kernels]


@pytest.mark.parametrize("case", served(), ids=lambda case: case.name)
def test_kernels_agree_with_their_references_in_any_order(case: Case, uninitialised_is_nan: None) -> None:
    for seed in range(3):
        problem, _ = outcome(case, "sm90", seed)
        assert problem is None, f"seed {seed}: {problem}"


def test_every_kernel_that_serves_was_run() -> None:
    """The cases that a CPU draws reach the kernels: a sweep that launches nothing shows nothing."""
    launched: set[str] = set()
    for case in {case.op.name: case for case in served() if "rows=6" in case.name and "bfloat16" in case.name}.values():
        launched |= {name for name, _, _ in outcome(case, "sm90", 0)[1]}
    assert {"linear", "moe", "sparse_mla", "attention_inputs"} <= launched


def alone(scores: Tensor, lengths: Tensor, table: Tensor, request: Tensor) -> list[Tensor]:
    """Every row's slots by the reference, over no more than its own scores."""
    found = []
    for row, length in enumerate(lengths.tolist()):
        pages = max(-(-length // 64), 1)
        given = scores[row : row + 1, : 64 * pages].contiguous(), lengths[row : row + 1], 2048, table[:, :pages]
        found.append(top_k.reference(*given, request[row : row + 1])[0][0])
    return found


@pytest.mark.parametrize(("rows", "turns"), [(20, 1), (22, 1), (24, 1), (24, 2)])
def test_selection_by_a_plan(rows: int, turns: int) -> None:
    """Long, short and empty rows in one launch; blocks that take several rows one after the other."""
    width, draw = 1 << 17, Draw(torch.Generator().manual_seed(rows), torch.device("cpu"))
    lengths = draw.integers(rows, low=0, high=12000)
    lengths[:12] = draw.listed(0, 1, 63, 2047, 2048, 2049, 81920, width, 30001, 64, 5000, 70000)
    if turns > 1:
        lengths[:12], lengths[12:] = 20000, 5400
    lengths = lengths[draw.distinct(rows, rows).long()].contiguous()
    scores = torch.as_strided(draw.normal(width + rows * 64), (rows, width), (64, 1))
    table, request = draw.distinct(3 * width // 64, 3 * width // 64).view(3, -1), draw.integers(rows, low=0, high=3)
    expected = alone(scores, lengths, table, request)
    for seed in range(2):
        with torch.inference_mode(), emulated(seed):
            plan = sm90.plan_top_k(lengths, request, 2048)
            slots, counts = sm90.top_k_sm90(scores, lengths, 2048, table, request, plan)
        assert plan is not None and plan[0] == turns
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(slots, expected, strict=True)), f"seed {seed}"
        assert torch.equal(counts, lengths.clamp(max=2048))
