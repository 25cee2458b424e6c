"""What the oracles of all sections share: their register, and numbers as exact as a float has them."""

from collections.abc import Callable

import torch
from torch import Tensor

ORACLES: dict[str, Callable] = {}


def oracle(function: Callable) -> Callable:
    ORACLES[function.__name__] = function
    return function


def double(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.float64)
