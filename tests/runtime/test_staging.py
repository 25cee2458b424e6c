"""What the host hands to the device: the numbers of a list, whatever their type, as PyTorch reads them."""

import pytest
import torch

from legato.runtime.staging import stage_into, staged

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [[], [0], [-1, 2**31 - 1, -(2**31)], list(range(-700, 700))], ids=len)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.int16, torch.float64], ids=str)
def test_numbers_arrive_as_they_are(values: list[int], dtype: torch.dtype) -> None:
    if dtype is torch.int16 and values and max(values) >= 1 << 15:
        values = [value >> 16 for value in values]
    expected = torch.tensor(values, dtype=dtype)
    found = staged(values, dtype, CPU)
    assert found.dtype == dtype and torch.equal(found, expected)
    target = torch.full((len(values) + 1,), 7, dtype=dtype)
    stage_into(target[:-1], values)
    assert torch.equal(target[:-1], expected) and target[-1] == 7


def test_fractions_are_rounded_once() -> None:
    values = [0.1, -1e-40, 3.4e38, 1e39, float("-inf")]
    assert torch.equal(staged(values, torch.float32, CPU), torch.tensor(values, dtype=torch.float32))


def test_large_integers_keep_every_bit() -> None:
    assert staged([2**63 - 1, -(2**63), 2**53 + 1], torch.int64, CPU).tolist() == [2**63 - 1, -(2**63), 2**53 + 1]
    with pytest.raises(OverflowError):
        staged([2**31], torch.int32, CPU)
