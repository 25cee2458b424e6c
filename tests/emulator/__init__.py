"""Runs the kernels of Legato on the CPU: their PTX, as NVRTC makes it, on a machine of warps written in C++.

Shows whether a kernel's logic is right, and whether it is right whatever the order in which warps, lanes and copies happen to
proceed. Knows nothing of speed. Called by tests and by people who write kernels (`python -m tests.emulator`); docs/kernels.md
says how. Nothing of the package imports it.
"""
