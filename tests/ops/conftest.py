"""Fixtures of the op tests: inference mode, and memory that is NaN until it is written."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Inference mode on one thread: the cases are small, and a second thread waits for its core more than it works."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """`torch.empty`, and every output buffer that an operator allocates, starts as NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
