"""What a file of tests needs that compiles kernels: importing this skips the file where the cuda extra or NVRTC is missing."""

import pytest

pytest.importorskip("cuda.core", reason="the cuda extra is not installed")
pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")

from legato.ops import build

try:
    build._nvrtc_version()
except RuntimeError as error:  # how cuda.bindings says that the library is not there
    pytest.skip(f"NVRTC is not installed: {error}", allow_module_level=True)
