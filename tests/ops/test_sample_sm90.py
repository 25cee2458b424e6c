"""Choosing tokens on Hopper. Without a GPU: the source compiles without spills, and how rows are cut. With one: what is hard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import sample
from legato.ops.sample import sm90


def test_the_source_compiles_without_spills():
    for kernel in (*sm90.kernels(16), *sm90.keys_kernels(16), sm90.best_kernel()):
        used = kernel.usage("sm_90a")
        assert used.registers <= 128 and used.spill_store_bytes == used.spill_load_bytes == 0, kernel.name


@pytest.mark.parametrize(
    ("width", "cluster", "expected"), [(154880, 16, 9680), (8192, 8, 1024), (1003, 16, 64), (1, 16, 4)]
)
def test_slices_are_whole_groups_that_cover_the_row(width: int, cluster: int, expected: int):
    assert sm90.slice_of(width, cluster) == expected and expected * cluster >= width and expected % 4 == 0


def _masked(noise: Callable[[], Tensor]) -> Tensor:
    return torch.where(torch.rand(6, 20011, device="cuda") < 0.999, -torch.inf, noise())


HARD: dict[str, Callable[[Callable[[], Tensor]], Tensor]] = {
    "many equal": lambda noise: noise().round(),
    "all equal": lambda noise: torch.zeros_like(noise()),
    "mostly masked": _masked,
    "all masked": lambda noise: torch.full_like(noise(), -torch.inf),
    "bfloat16": lambda noise: noise().bfloat16().float(),
}
SETTINGS = [
    (0, 0.95, 0.0),
    (40, 1.0, 0.0),
    (50, 0.9, 0.02),
    (1, 1.0, 0.0),
    (0, 0.3, 0.0),
    (20011, 0.999, 0.0),
    (3000, 0.5, 0.1),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", list(HARD))
def test_hard_rows_give_the_references_tokens(kind: str):
    torch.manual_seed(0)
    logits = HARD[kind](lambda: torch.randn(6, 20011, device="cuda") * 3)
    for top_k, top_p, min_p in SETTINGS:
        temperature, ones = torch.linspace(0.3, 1.5, 6, device="cuda"), torch.ones(6, device="cuda")
        seed, position = torch.randint(0, 1 << 60, (6,), device="cuda"), torch.randint(0, 1 << 20, (6,), device="cuda")
        arguments = (temperature, (ones * top_k).int(), ones * top_p, ones * min_p, seed, position)
        assert torch.equal(sm90.sample_sm90(logits, *arguments), sample.reference(logits, *arguments)), (top_k, top_p)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 6, 9])
@pytest.mark.parametrize("width", [154880, 20011, 3])
def test_the_best_of_bfloat16_rows_is_that_of_the_same_numbers_in_float32(rows: int, width: int):
    torch.manual_seed(0)
    wider = torch.randn(rows, width + 5, device="cuda").bfloat16()
    for logits in (wider[:, :width], wider[:, :width].contiguous(), wider[:, 1 : width + 1], torch.zeros_like(wider)):
        assert torch.equal(sm90.greedy_sm90(logits), logits.float().argmax(-1))
