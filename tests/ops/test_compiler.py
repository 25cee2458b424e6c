"""The compiler of kernels is part of what `make check` installs: without it the tests of all kernels would be skipped, unseen."""

import importlib
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built for Linux")
def test_kernels_can_be_compiled_here() -> None:
    importlib.import_module("cuda.core")
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    status, major, minor = nvrtc.nvrtcVersion()
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS and (major, minor) == (13, 0), "as the extras pin it"
