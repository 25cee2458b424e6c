"""Experts are packed once, with their shared one, where another implementation than the reference is bound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from legato.ops import moe_bf16
from legato.ops.op import Implementation
from legato.quant.dense import DenseExperts, DenseWeight
from legato.quant.fp8_block import quantize_fp8_block
from legato.quant.nvfp4 import quantize_nvfp4
from legato.quant.packed import PackedExperts, keep


@pytest.fixture
def experts() -> DenseExperts:
    return DenseExperts(torch.randn(4, 32, 16), torch.randn(4, 16, 16))


@pytest.fixture
def shared() -> tuple[DenseWeight, DenseWeight]:
    return DenseWeight(torch.randn(32, 16)), DenseWeight(torch.randn(16, 16))


@pytest.fixture
def bound() -> Iterator[None]:
    """The reference under another name, whose packing is a copy."""
    before = moe_bf16.bound
    moe_bf16.bound = Implementation("other", moe_bf16.reference, lambda *weights: tuple(w.clone() for w in weights))
    yield
    moe_bf16.bound = before


def test_the_reference_keeps_what_is_stored(experts: DenseExperts, shared: tuple[DenseWeight, DenseWeight]) -> None:
    assert keep(experts, shared) == (experts, False)


def test_packed_experts_hold_the_shared_one_and_give_the_same_sum(
    experts: DenseExperts, shared: tuple[DenseWeight, DenseWeight], bound: None
) -> None:
    x, ids, weights = torch.randn(3, 16), torch.tensor([[0, 2], [1, 3], [2, -1]], dtype=torch.int32), torch.rand(3, 2)
    alone, inside = keep(experts, None)
    assert isinstance(alone, PackedExperts) and not inside and len(alone.stored) == 2
    packed, inside = keep(experts, shared)
    assert inside and packed.num_experts == 4 and packed.format is experts.format
    assert packed.nbytes == experts.nbytes + shared[0].nbytes + shared[1].nbytes
    apart = experts.moe(x, ids, weights) + moe_bf16.reference(
        x, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), shared[0].tensor[None], shared[1].tensor[None]
    )
    assert torch.allclose(packed.moe(x, ids, weights), apart, atol=1e-5)
    with pytest.raises(TypeError, match="before packing"):
        packed.dequantize(torch.float32)


def test_a_shared_expert_in_fp8_blocks_goes_inside_with_its_scales(experts: DenseExperts, bound: None) -> None:
    weight = quantize_fp8_block(torch.randn(128, 128))
    packed, inside = keep(experts, (weight, weight))
    assert isinstance(packed, PackedExperts) and inside and len(packed.stored) == 6
    assert packed.shared_nbytes == 2 * weight.nbytes and packed.nbytes == experts.nbytes + packed.shared_nbytes


def test_another_shared_expert_stays_outside(experts: DenseExperts, bound: None) -> None:
    weight = quantize_nvfp4(torch.randn(128, 128))
    packed, inside = keep(experts, (weight, weight))
    assert not inside and len(packed.stored) == 2
