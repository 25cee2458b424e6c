"""Which kernels this process has compiled: a server that is ready compiles none; and how it gets there sooner.

Owns the count over all compilers in use, and the rehearsal of work whose kernels are then compiled side by side. Imports no
compiler: where none was imported, nothing was compiled. Called by the engine's warm-up and by benchmarks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
NAMESPACE = "legato"
"""Of the ops that Legato gives to PyTorch's dispatcher."""


def compilations() -> int:
    """Kernels compiled by NVRTC since the process started; those read from the cache on disk do not count."""
    build = sys.modules.get("legato.ops.build")
    return 0 if build is None else build.STORE.compilations


def compile_ahead(rehearse: Callable[[], None], arch: str | None = None) -> int:
    """Runs work without launching a kernel of ours, and compiles all that it would have launched, side by side.

    What those kernels would have written is zeros, so that whatever PyTorch does with it is sound. Returns how many kernels had
    to be compiled; 0 where none of ours are in use. `arch`: of the current device.
    """
    build = sys.modules.get("legato.ops.build")
    if build is None:
        return 0
    build.STORE.noted = {}
    try:
        with _Zeros():
            rehearse()
        return build.STORE.compile_noted(build.architecture() if arch is None else arch)
    finally:
        build.STORE.noted = None


class _Zeros(TorchDispatchMode):
    """New tensors hold zeros, not what happens to lie there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # An op of ours is one call to this mode, which does not see what is allocated inside. It returns none of its arguments.
        if func.name().partition(".")[0] in _EMPTY or func.namespace == NAMESPACE:
            for tensor in tree_iter(made):
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
        return made
