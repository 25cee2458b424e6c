"""Kernels are compiled before they run, side by side, from a rehearsal that launches none."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import build, compiled
from legato.ops.compiled import compilations, compile_ahead

HOW = build.Launch(grid=(1,), block=(1,))


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[build.Kernel]:
    """Two variants of one source, and a store of their own."""
    monkeypatch.setattr(build, "STORE", build.Store(tmp_path / "cache"))
    source = tmp_path / "fill.cu"
    source.write_text('extern "C" __global__ void fill(float *out) { out[threadIdx.x] = VALUE; }')
    return [build.Kernel(build.Source(source, {"VALUE": value}), "fill") for value in (1, 2)]


def test_what_is_rehearsed_is_compiled_and_not_launched(kernels: list[build.Kernel]) -> None:
    made: list[torch.Tensor] = []

    def rehearse() -> None:
        for kernel in (*kernels, kernels[0]):
            made.append(torch.empty(1 << 16))
            kernel(HOW, made[-1])  # needs no GPU: nothing is launched
        made.append(torch.empty_like(made[0]).new_empty(100))

    assert compile_ahead(rehearse, "sm_90a") == 2 == compilations()
    assert not any(tensor.any() for tensor in made), "what nobody wrote is zero"
    assert kernels[1].usage("sm_90a").registers > 0 and compilations() == 2
    build.STORE = build.Store(build.STORE.directory)
    assert compile_ahead(lambda: kernels[0](HOW), "sm_90a") == 0, "it is on disk"
    assert build.STORE.noted is None


def test_other_threads_launch_meanwhile(kernels: list[build.Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the process may be serving."""
    launched: list[object] = []
    monkeypatch.setattr(build, "launch", lambda stream, how, kernel: launched.append(kernel))
    for kernel in kernels:
        for name in ("_stream", "_config", "load"):
            monkeypatch.setattr(kernel, name, lambda *_, kernel=kernel: kernel)

    def rehearse() -> None:
        thread = threading.Thread(target=kernels[0], args=(HOW,))
        thread.start()
        thread.join()
        kernels[1](HOW)

    assert compile_ahead(rehearse, "sm_90a") == 1 and launched == [kernels[0]]


@torch.library.custom_op("legato_rehearsed::slots", mutates_args=())
def slots(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((4,), 10**6), torch.full((rows.shape[0],), -7)


def test_what_an_op_of_ours_allocates_inside_is_zero_too(
    kernels: list[build.Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices that nobody wrote, read by PyTorch, would end the process."""
    rows, made = torch.ones(3), list[torch.Tensor]()

    def rehearse() -> None:
        with torch.inference_mode():
            made.extend(slots(rows))

    compile_ahead(rehearse, "sm_90a")
    assert all(tensor.all() for tensor in made), "an op of somebody else is left alone"
    made.clear()
    monkeypatch.setattr(compiled, "NAMESPACE", "legato_rehearsed")
    compile_ahead(rehearse, "sm_90a")
    assert len(made) == 2 and not any(tensor.any() for tensor in made) and rows.all()


def test_a_source_that_does_not_compile_is_named(kernels: list[build.Kernel]) -> None:
    kernels[0].source.path.write_text("extern int nonsense(")
    with pytest.raises(build.BuildError, match=r"fill\.cu does not compile"):
        compile_ahead(lambda: kernels[0](HOW), "sm_90a")
    assert build.STORE.noted is None
