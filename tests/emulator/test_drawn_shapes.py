"""Kernels at shapes that nobody chose, each in an order of its own: what a table of cases leaves out shows here.

A failing draw says its seed; `drawn(kind, seed)` is that case again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import attend, linear_bf16, linear_draft, linear_fp8_block, moe_bf16, moe_fp8_block, moe_int4, moe_nvfp4
from legato.ops.attend import masked
from legato.ops.attend import sm90 as attention
from legato.ops.attend.sm90_forms import Cut, Form, Way
from legato.ops.case import Case, Tolerance
from legato.ops.experts import cases as experts
from legato.ops.experts import sm90_launch, sm90_route
from legato.ops.gemm import cases as gemm
from legato.ops.gemm import linear_bf16_normed, linear_fp8_block_normed
from legato.ops.op import implemented
from legato.ops.prologue import cases as prologue
from legato.ops.score import _case as score_case
from legato.ops.select import _case as select_case
from tests.emulator.native import compiler
from tests.emulator.parity import outcome

pytestmark = [pytest.mark.full, pytest.mark.skipif(compiler() is None, reason="needs g++")]
BF16 = torch.bfloat16


def draw_products(draw: random.Random) -> Case:
    shape = 16 * draw.randint(1, 40), draw.choice([32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 1024, 1536])
    rows = draw.choice([1, 2, 3, 8, 9, 16, 17, 24, 33, 48, 49, 64, 65, 97, 128, 129])
    kind = draw.choice([linear_bf16, linear_fp8_block, linear_draft, linear_bf16_normed, linear_fp8_block_normed])
    if kind in (linear_bf16_normed, linear_fp8_block_normed):
        return gemm._normed_case(kind, rows, shape, BF16, "any")
    case = gemm._weight_case(kind, rows, shape, BF16, "any")
    return gemm._added(case) if kind is not linear_draft and draw.random() < 0.5 else case


def draw_heads(draw: random.Random) -> Case:
    shape = draw.choice([16, 32, 48, 64, 128, 192, 512]), draw.choice([32, 64, 96, 128, 192, 512])
    return gemm._heads_case(draw.choice([1, 2, 9, 17, 40, 65, 129]), draw.randint(1, 5), shape, BF16)


def draw_prologue(draw: random.Random) -> Case:
    """Ranks of 4 and 12 have latents that begin within a piece of 16 bytes."""
    shape = prologue._Shape(
        draw.choice([4, 8, 12, 16, 24, 128]), draw.randint(1, 9), draw.choice([16, 32, 64, 96, 192])
    )
    rows = draw.choice([1, 2, 3, 5, 7, 8, 9, 15, 16, 17])
    cached = draw.choice([BF16, torch.uint8])
    return prologue._case(draw.choice(["full", "shared"]), shape, rows, BF16, (cached, torch.uint8))


def draw_scores(draw: random.Random) -> Case:
    lengths = [draw.choice([0, 1, 63, 64, 65, 127, 128, 129, 200, 300, 700]) for _ in range(draw.randint(1, 5))]
    return score_case(draw.choice([1, 2, 3, 6, 7, 8, 9, 12]), torch.uint8, (*lengths, draw.randint(1, 200)))


def draw_selection(draw: random.Random) -> Case:
    longest = draw.choice([1, 2, 63, 64, 65, 127, 129, 300, 1000, 2047, 2048, 2049, 4100, draw.randint(1, 9000)])
    rows, k = draw.choice([1, 2, 3, 6, 9, 17, 26]), draw.choice([1, 2, 3, 7, 64, 100, 256, 2048])
    return select_case(rows, k, longest, draw.choice([1, 20, 1000]), wide=draw.choice([0, 0, 12000]))


def draw_attention(draw: random.Random) -> Case:
    heads = draw.choice([1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 33, 64, 65])
    width = draw.choice([1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 300, 1000])
    return attend._absorbed_case(draw.choice([1, 2, 3, 6, 17]), heads, width, BF16, draw.choice([BF16, torch.uint8]))


def draw_rows_together(draw: random.Random) -> Case:
    heads, width = draw.randint(1, 3), draw.choice([8, 40, 100, 500])
    rows, start = draw.choice([1, 8, 17, 121, 128, 130, 264]), draw.choice([0, 1, 63, 64, 70, 127, 128, 300])
    return masked._case(start, rows, heads, width, BF16)


def draw_experts(draw: random.Random) -> Case:
    """Some choices masked, all of them, or all rows with one expert."""
    moe, count = draw.choice([moe_bf16, moe_fp8_block, moe_nvfp4, moe_int4]), draw.choice([1, 2, 3, 8, 17])
    rows, choices = draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33]), draw.randint(1, min(count, 9))
    sizes = count, draw.choice([128, 256, 512]), draw.choice([128, 256, 384, 640])
    case = experts._moe_case(moe, rows, choices, sizes, BF16)
    if (form := draw.choice([None, "bf16", "fp8"])) is not None:
        case = experts._with_shared(case, rows, sizes[1:], form)
    kept = draw.choice([0.0, 0.5, 1.0])

    def make(drawn: experts.Draw) -> tuple[object, ...]:
        x, ids, *rest = case.make(drawn)
        return x, ids.masked_fill(drawn.uniform(*ids.shape) >= kept, -1), *rest

    return replace(case, make=make, tolerance=Tolerance(2.0**-6, 2.0**-4))


def draw_routes(draw: random.Random) -> Case:
    count = draw.choice([1, 2, 5, 8, 16, 17, 31, 64, 100, 256, 300])
    k, hidden = draw.randint(1, min(count, draw.choice([1, 8, 33]))), draw.choice([64, 96, 128, 256, 512, 640])
    return experts._route_case(draw.choice([1, 2, 6, 16, 17, 64, 65, 70]), count, k, hidden, BF16)


KINDS: dict[str, Callable[[random.Random], Case]] = {
    name.removeprefix("draw_"): function for name, function in list(globals().items()) if name.startswith("draw_")
}


def drawn(kind: str, seed: int) -> Case:
    return KINDS[kind](random.Random(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_shapes_agree_with_the_reference(kind: str, uninitialised_is_nan: None) -> None:
    implemented("sm90")
    launches = 0
    for seed in range(8 if kind == "experts" else 24):  # those take seconds each
        # What an interrupted launch has left is not the next one's fault.
        sm90_launch.features.cache_clear()
        sm90_route._sums.cache_clear()
        case = drawn(kind, seed)
        loose = Tolerance(2 * case.tolerance.relative, 2 * case.tolerance.absolute)
        problem, launched = outcome(replace(case, tolerance=loose), "sm90", seed % 8)
        assert problem is None, f"seed {seed}: {case.name}: {problem}"
        launches += len(launched)
    assert launches >= 6, "most draws should reach a kernel"


@pytest.mark.parametrize("seed", range(8))
def test_blocks_that_stay_take_row_after_row(
    seed: int, monkeypatch: pytest.MonkeyPatch, uninitialised_is_nan: None
) -> None:
    """As on a GPU of so few multiprocessors that one to three blocks take all rows, of nothing to several units."""
    implemented("sm90")
    draw = random.Random(seed)
    heads, across = draw.choice([1, 5, 8, 9, 16]), draw.randint(1, 3)
    form = Form(8 if heads <= 8 else 16, False, Way.STAYING)
    monkeypatch.setattr(attention, "cut", lambda *_: Cut(form, 1, form.fixed_bytes, across))
    case = attend._absorbed_case(draw.randint(3, 9), heads, draw.choice([7, 63, 64, 65, 130, 200]), BF16, BF16)
    loose = Tolerance(2 * case.tolerance.relative, 2 * case.tolerance.absolute)
    problem, launched = outcome(replace(case, tolerance=loose), "sm90", seed)
    assert problem is None, f"{case.name}: {problem}"
    assert [name for name, _, _ in launched] == ["sparse_mla"]
