"""The products in CuTe DSL: what is said where the package is missing, and on a GPU error, bits and what is handed on."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.gemm import linear_bf16
from legato.ops.op import BindError, bind, implemented


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.delitem(sys.modules, "legato.ops.gemm.cutedsl", raising=False)
    monkeypatch.delitem(linear_bf16.implementations, "cutedsl", raising=False)
    with pytest.raises(BindError, match=r"gemm=cutedsl cannot be imported.*pip install 'legato\[cutedsl\]'"):
        bind([], {"linear_bf16": "cutedsl"})


def run(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    implemented("cutedsl")
    return linear_bf16.implementations["cutedsl"].run(x, weight, residual)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device="cuda").bfloat16()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2624, 6144), (2048, 2048), (512, 6144), (6144, 256), (576, 256), (16, 32)], ids=str)
def test_error_and_bits(shape: tuple[int, int], uninitialised_is_nan: None) -> None:
    """Error at most twice that of the plain product, between rows of NaN; the same bits alone and at every place of 1 to 16 rows;
    repeated calls agree, and more rows are the library's."""
    pytest.importorskip("cutlass")
    outputs, inputs = shape
    weight = (draw(outputs, inputs).float() * inputs**-0.5).bfloat16()
    padded = torch.full((42, inputs), float("nan"), device="cuda", dtype=torch.bfloat16)
    padded[1:41] = draw(40, inputs)
    x, residual = padded[1:41], draw(40, outputs)
    alone = torch.cat([run(x[row : row + 1], weight, residual[row : row + 1]) for row in range(16)])
    for count in (1, 6, 8, 9, 16, 40):
        found = run(x[:count], weight, residual[:count])
        assert count > 16 or torch.equal(found, alone[:count]), count
        assert torch.equal(found, run(x[:count], weight, residual[:count]))
        for added in (None, residual[:count]):
            exact = x[:count].double() @ weight.double().t() + (0.0 if added is None else added)
            plain = functional.linear(x[:count], weight) + (0.0 if added is None else added)
            error, allowed = (float((y.double() - exact).norm()) for y in (run(x[:count], weight, added), plain))
            assert error <= 2 * allowed, (count, added is None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_else_is_handed_on() -> None:
    """Widths that no block divides, rows in odd places, float32, no rows."""
    pytest.importorskip("cutlass")
    weight, x = draw(72, 48), draw(6, 48)
    assert torch.equal(run(x, weight), functional.linear(x, weight))
    weight, x = draw(64, 64), draw(6, 65)[:, 1:]
    assert torch.allclose(run(x, weight).float(), x.float() @ weight.float().t(), rtol=2.0**-6, atol=2.0**-4)
    assert torch.equal(run(x.float(), weight), linear_bf16.reference(x.float(), weight))
    assert run(x[:0], weight).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launches_in_a_graph_wait_for_one_another() -> None:
    pytest.importorskip("cutlass")
    into, back = draw(2048, 512), draw(512, 2048)
    start = draw(6, 512)

    def chain() -> Tensor:
        x = start
        for _ in range(12):
            x = run((run(x, into).float() * 512**-0.5).bfloat16(), back)
            x = (x.float() * 2048**-0.5).bfloat16()
        return x

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(10):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
