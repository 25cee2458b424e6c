"""Packed weights: the same product from another layout."""

import torch

from legato import ops
from legato.ops.invariant import PACKED_BLOCK


def test_a_packed_weight_gives_the_same_product() -> None:
    x, weight, residual = torch.randn(9, 100), torch.randn(96, 100), torch.randn(9, 96)
    packed = ops.linear_bf16.pack(weight)
    assert packed.shape == (96 // PACKED_BLOCK, 100, PACKED_BLOCK) and packed.is_contiguous()
    assert torch.allclose(ops.linear_bf16(x, packed, residual), ops.linear_bf16(x, weight, residual), atol=1e-5)
    assert ops.linear_bf16(x[:0], packed).shape == (0, 96)


def test_a_width_that_no_block_divides_stays_as_it_is() -> None:
    weight = torch.randn(24, 8)
    assert ops.linear_bf16.pack(weight) is weight


def test_packed_experts_give_the_same_sum() -> None:
    x, ids = torch.randn(20, 32), torch.randint(-1, 4, (20, 2), dtype=torch.int32)
    weights, w13, w2 = torch.rand(20, 2), torch.randn(4, 96, 32), torch.randn(4, 32, 48)
    packed = ops.moe_bf16.pack(w13, w2)
    for rows in (20, 6, 1):
        some = x[:rows], ids[:rows], weights[:rows]
        assert torch.allclose(ops.moe_bf16(*some, *packed), ops.moe_bf16(*some, w13, w2), atol=1e-3)
