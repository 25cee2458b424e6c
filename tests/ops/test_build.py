"""The build of CUDA C++ sources, without a GPU: what is cached, what is counted, what is refused and how it is said."""

import ctypes
from enum import IntEnum
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("tests.ops.nvrtc")

from legato.ops import build
from legato.ops.build import BuildError, Kernel, Launch, Source, Store, usage_in

TEXT = """
#include <cuda_fp16.h>
#include "scale.cuh"
extern "C" __global__ void __launch_bounds__(64) grow(float* values) { values[threadIdx.x] *= SCALE * FACTOR; }
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "grow.cu").write_text(TEXT)
    (tmp_path / "scale.cuh").write_text("#pragma once\n#define SCALE 2.0f\n")
    return Source(tmp_path / "grow.cu", defines={"FACTOR": 3})


def test_compiled_once_then_read_from_disk(source: Source, tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    made = store.binary(source, "sm_90a")
    assert made.cubin[:4] == b"\x7fELF" and made.usage["grow"].registers > 0
    assert made.usage["grow"].spill_store_bytes == 0
    assert store.binary(source, "sm_90a") is made and store.compilations == 1
    again = Store(tmp_path / "cache")
    assert again.binary(source, "sm_90a") == made and again.compilations == 0
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cubin"]


def test_whatever_decides_the_bytes_is_in_the_key(source: Source, tmp_path: Path) -> None:
    store = Store(None)
    store.binary(source, "sm_90a")
    store.binary(source, "sm_100a")
    store.binary(Source(source.path, {"FACTOR": 4}), "sm_90a")
    store.binary(Source(source.path, {"FACTOR": 3}, max_registers=32), "sm_90a")
    (tmp_path / "scale.cuh").write_text("#pragma once\n#define SCALE 5.0f\n")
    store.binary(source, "sm_90a")
    assert store.compilations == 5


@pytest.mark.parametrize("spoil", [lambda data: data[:-7], lambda data: b"{}\n" + data, lambda data: b""])
def test_a_spoilt_cache_file_is_replaced(source: Source, tmp_path: Path, spoil) -> None:
    made = Store(tmp_path / "cache").binary(source, "sm_90a")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(spoil(file.read_bytes()))
    store = Store(tmp_path / "cache")
    assert store.binary(source, "sm_90a").usage == made.usage and store.compilations == 1
    assert Store(tmp_path / "cache").binary(source, "sm_90a").usage == made.usage


def test_a_directory_that_cannot_be_written_costs_a_warning(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = Store(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="compiled kernels are not kept: .*file"):
        store.binary(source, "sm_90a")
    assert store.directory is None


def test_errors_show_the_compilers_words(source: Source, tmp_path: Path) -> None:
    source.path.write_text(TEXT.replace("FACTOR", "MISSING"))
    with pytest.raises(BuildError, match=r"grow\.cu does not compile for sm_90a(.|\n)*MISSING"):
        Store(None).binary(source, "sm_90a")
    (tmp_path / "scale.cuh").unlink()
    with pytest.raises(BuildError, match=r"scale\.cuh, which does not exist"):
        Store(None).binary(source, "sm_90a")


def test_missing_headers_are_named(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvidia_header_directory", lambda library: None)
    with pytest.raises(BuildError, match="nvidia-cuda-runtime"):
        Store(None).binary(source, "sm_90a")


def test_a_grid_counts_blocks() -> None:
    assert build._clusters(Launch((96,), (128,), cluster=(16,))) == (6, 1, 1)
    assert build._clusters(Launch((96, 2), (128,))) == (96, 2, 1)
    with pytest.raises(BuildError, match="does not divide"):
        build._clusters(Launch((100,), (128,), cluster=(16,)))


def test_arguments_keep_their_width() -> None:
    assert isinstance(build._argument(7), ctypes.c_int32) and isinstance(build._argument(7.0), ctypes.c_float)
    wide = ctypes.c_int64(1 << 40)
    assert build._argument(wide) is wide and build._argument(None) == 0
    with pytest.raises(BuildError, match="c_int64"):
        build._argument(1 << 31)


def test_arguments_of_derived_types_are_those_of_their_base() -> None:
    assert isinstance(build._argument(IntEnum("Mode", "A").A), ctypes.c_int32)
    assert isinstance(build._argument(numpy.float64(2.0)), ctypes.c_float)
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert build._argument(parameter) == parameter.data_ptr() != 0
    assert build._argument(True) is True


def test_a_log_of_two_kernels() -> None:
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert usage_in(log) == {"a": build.Usage(40, 16, 8, 12, 1024), "b": build.Usage(8, 0, 0, 0, 0)}


def test_declaring_a_kernel_touches_no_device(source: Source) -> None:
    kernel = Kernel(source, "grow")
    assert kernel.usage("sm_90a").static_shared_bytes == 0
