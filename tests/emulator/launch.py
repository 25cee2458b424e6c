# pyright: basic, reportAttributeAccessIssue=false
"""Stands in for the GPU: within `emulated(...)` a kernel's call runs it on CPU tensors, and the ops' own Python code takes the
machine for an H200.

Owns the translation of a source (kept on disk), arguments, the memory that a kernel may touch, and how a run is drawn. Called by
tests and by `python -m tests.emulator`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import pickle
import random
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuda.bindings import nvrtc
from torch import Tensor

from legato.ops import build
from legato.ops.build import BuildError, Kernel, Launch, Source
from tests.emulator.native import cache_directory, library, signatures, write_whole
from tests.emulator.program import Code, lower
from tests.emulator.ptx import parse

PROCESSORS = 132
_SHARED_BYTES, _RESERVED_BYTES, _THREADS = 227 * 1024, 1024, 2048
_MARK = 0x7E4503A9
_LINE = re.compile(r"PTX line (\d+)")


class EmulationError(Exception):
    """A kernel did what it must not, or cannot go on; the message names the kernel, the place and the line."""


@dataclass
class Emulation:
    """How kernels run while it is in force, and what they took: (kernel, instructions, turns) of each launch. `ranges`: memory
    that they may touch though no argument is it, as addresses that stand in other memory (begin, end)."""

    seed: int = 0
    most_instructions: int = 20_000_000_000
    launched: list[tuple[str, int, int]] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def policy(self) -> list[int]:
        """land, split, explore (65536ths), budget, window, in order, seed, limit; drawn from the seed. 0: all in order, copies
        land at once. 1: in a drawn order, and copies land as late as they may."""
        if self.seed == 0:
            return [65536, 0, 0, 1, 4, 1, 1, self.most_instructions]
        seed, draw = self.seed, random.Random(self.seed * 1000 + len(self.launched))
        land = (300, 0, 20000, 3000, 65536)[seed % 5]
        split, explore = (16000, 0, 2000)[seed % 3], (0, 20000, 2000)[seed // 2 % 3]
        budget, window = (40, 1000, 8, 200)[seed % 4], (2, 16, 1, 4)[seed // 3 % 4]
        return [land, split, explore, budget, window, 0, draw.getrandbits(60) | 1, self.most_instructions]


_CURRENT: list[Emulation] = []


@contextlib.contextmanager
def emulated(seed: int = 0, most_instructions: int = 20_000_000_000) -> Iterator[Emulation]:
    """Kernels run on the CPU. `seed`: how they interleave. Raises EmulationError from the call of a kernel."""
    library()
    _serve_cpu_tensors()
    made = Emulation(seed, most_instructions)
    own = {
        (Kernel, "__call__"): _call,
        (Kernel, "max_active_clusters"): _max_active_clusters,
        (Kernel, "load"): lambda kernel: None,
        (torch.cuda, "get_device_properties"): _properties,
    }
    for module in [
        module for name, module in sys.modules.items() if name.startswith("legato.ops") and module is not None
    ]:
        if getattr(module, "tensor_map", None) is not None:
            own[module, "tensor_map"] = tensor_map
    with contextlib.ExitStack() as stack:
        for (owner, name), value in own.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        _CURRENT.append(made)
        stack.callback(_CURRENT.pop)
        yield made


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        multi_processor_count=PROCESSORS, major=9, minor=0, name="emulated H200", total_memory=141 << 30
    )


def _serve_cpu_tensors() -> None:
    """PyTorch's dispatcher takes our operators to exist for CUDA tensors alone."""
    for name, declared in list(torch._library.custom_ops.OPDEFS.items()):
        if name.startswith("legato::") and "cpu" not in declared._backend_fns:
            body = declared._init_fn

            def run(*args: Any, _body: Any = body, _name: str = name, **kwargs: Any) -> Any:
                if not _CURRENT:
                    raise NotImplementedError(f"{_name} has CPU tensors, outside of emulated(...)")
                return _body(*args, **kwargs)

            declared.register_kernel("cpu")(run)


# ---- translation


def ptx_of(source: Source) -> str:
    """The PTX of a source for sm_90a, by the options that its kernels are built with, and with line numbers."""
    options = ["--gpu-architecture=compute_90a", "--std=c++17", "-lineinfo", f"-I{source.path.parent}"]
    options += [f"-I{directory}" for directory in build._header_directories()]
    options += [f"-D{name}={value}" for name, value in sorted(source.defines.items())]
    if source.max_registers is not None:
        options.append(f"--maxrregcount={source.max_registers}")
    _, program = nvrtc.nvrtcCreateProgram(source.path.read_text().encode(), str(source.path).encode(), 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(result):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BuildError(f"{source.path.name} does not compile:\n{log.decode()}")
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0").decode()


def _kept(key: str, make: Any) -> Any:
    path = cache_directory() / f"{key}.pickle"
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError, AttributeError):
        return pickle.loads(path.read_bytes())
    made = make()
    write_whole(path, pickle.dumps(made))
    return made


_PROGRAMS: dict[tuple[str, str], tuple[Code, Any]] = {}


def program_of(kernel: Kernel) -> tuple[Code, Any]:
    """A kernel's code and the machine's handle of it; translated once."""
    source_key = build._key(kernel.source, "sm_90a")
    found = _PROGRAMS.get((source_key, kernel.name))
    if found is None:
        key = hashlib.sha256(_translators() + source_key.encode() + kernel.name.encode()).hexdigest()[:32]

        def make() -> Code:
            return lower(
                parse(_kept(f"ptx-{source_key[:32]}", lambda: ptx_of(kernel.source))), kernel.name, signatures()
            )

        code = _kept(key, make)
        found = _PROGRAMS[source_key, kernel.name] = code, _native(code)
    return found


def _translators() -> bytes:
    """What a translation depends on besides the PTX."""
    texts = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("ptx", "program", "opcodes", "together")]
    return b"".join([*texts, repr(sorted(signatures().items())).encode()])


def _native(code: Code) -> Any:
    made = library().emulator_program(
        code.names.encode(),
        _pointer(code.code),
        ctypes.c_int64(len(code.code)),
        _pointer(code.operands),
        ctypes.c_int64(len(code.operands)),
        _pointer(code.constants),
        ctypes.c_int64(len(code.constants)),
        _pointer(code.specials),
        ctypes.c_int64(len(code.specials)),
        _pointer(code.sizes),
    )
    if not made:
        raise EmulationError("the machine lacks an instruction that the translation uses")
    return ctypes.c_void_p(made)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


# ---- arguments


@dataclass(frozen=True)
class TensorMap:
    """Stands in for cuda.core's descriptor: what the machine's copies of boxes read."""

    data: bytes
    tensor: Tensor


def tensor_map(tensor: Tensor, box: Any, swizzle: int = 0) -> TensorMap:
    """As `legato.ops.build.tensor_map`."""
    count = tensor.dim()
    sizes, strides = list(tensor.shape)[::-1], [stride * tensor.element_size() for stride in tensor.stride()][::-1]
    inner = box[-1] * tensor.element_size()
    if not 1 <= count <= 5 or len(box) != count or strides[0] != tensor.element_size():
        raise ValueError(f"tensor_map: {count} dimensions, box {tuple(box)}, strides {tensor.stride()}")
    if (
        any(stride % 16 for stride in strides[1:])
        or tensor.data_ptr() % 16
        or inner % 16
        or (swizzle and inner > swizzle)
    ):
        raise ValueError(
            f"tensor_map: strides of {strides} bytes, {inner} bytes of a row: multiples of 16, within the swizzle"
        )
    padded = [*sizes, *[1] * (5 - count)], [*strides, *[0] * (5 - count)], [*list(box)[::-1], *[1] * (5 - count)]
    data = struct.pack(
        "<Q5Q5Q5HBBII",
        tensor.data_ptr(),
        *padded[1],
        *padded[0],
        *padded[2],
        count,
        tensor.element_size(),
        swizzle,
        _MARK,
    )
    return TensorMap(data.ljust(128, b"\0"), tensor)


def _argument(value: Any, size: int, name: str) -> bytes:
    if isinstance(value, TensorMap):
        data = value.data
    elif isinstance(value, Tensor):
        data = struct.pack("<Q", value.data_ptr())
    elif value is None:
        data = struct.pack("<Q", 0)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        data = bytes(value) if not isinstance(value, np.generic | bool) else np.asarray(value).tobytes()
    else:
        data = bytes(build._argument(value))
    if len(data) != size:
        raise EmulationError(f"{name}: an argument of {len(data)} bytes for a parameter of {size}: {value!r}")
    return data


def _ranges(arguments: tuple[Any, ...]) -> np.ndarray:
    found: set[tuple[int, int]] = set()
    for value in arguments:
        tensor = value.tensor if isinstance(value, TensorMap) else value
        if isinstance(tensor, Tensor):
            if tensor.device.type != "cpu":
                raise EmulationError(f"an argument is on {tensor.device}; the emulator has CPU tensors")
            storage = tensor.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    found |= set(_CURRENT[-1].ranges)
    return np.array(sorted(found) or [(0, 0)], dtype=np.uint64)


def _resident(how: Launch, shared_bytes: int) -> int:
    """How many blocks run at once, by threads and shared memory."""
    threads = int(np.prod(how.block))
    blocks = min(
        32, _THREADS // (-(-threads // 32) * 32), (_SHARED_BYTES + _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)
    )
    return PROCESSORS * blocks


def _max_active_clusters(kernel: Kernel, how: Launch) -> int:
    code, _ = program_of(kernel)
    return _resident(how, code.static_shared_bytes + how.shared_bytes) // int(np.prod(how.cluster or (1,)))


def _call(kernel: Kernel, how: Launch, *arguments: Any) -> None:
    if (noted := build.STORE.noted) is not None:
        noted[id(kernel)] = kernel
        return
    emulation = _CURRENT[-1]
    code, handle = program_of(kernel)
    name = f"{kernel.source.path.name}: {kernel.name}"
    three = build._three
    build._clusters(how)
    grid, block, cluster = three(how.grid), three(how.block), three(how.cluster or (1,))
    shared = code.static_shared_bytes + how.shared_bytes
    resident = _resident(how, shared)
    size = int(np.prod(cluster))
    if shared > _SHARED_BYTES or how.shared_bytes > max(kernel.shared_bytes, 48 * 1024) or np.prod(block) > 1024:
        raise EmulationError(
            f"{name}: {how} cannot be launched: {code.static_shared_bytes} bytes static, at most {kernel.shared_bytes}"
        )
    if size > (16 if kernel.non_portable_cluster else 8) or (how.cooperative and np.prod(grid) > resident):
        raise EmulationError(f"{name}: {how} cannot be launched")
    if len(arguments) != len(code.parameters):
        raise EmulationError(f"{name}: {len(arguments)} arguments for {len(code.parameters)} parameters")
    parameters = bytearray(max((at + size for at, size in code.parameters), default=0) + 16)
    for value, (at, count) in zip(arguments, code.parameters):
        parameters[at : at + count] = _argument(value, count, name)
    held = np.zeros(len(parameters) + 128, dtype=np.uint8)
    start = -held.ctypes.data % 128
    held[start : start + len(parameters)] = np.frombuffer(parameters, dtype=np.uint8)
    ranges, counts, error = _ranges(arguments), np.zeros(2, dtype=np.uint64), ctypes.create_string_buffer(1 << 16)
    shape = np.array([*grid, *block, *cluster, how.shared_bytes, resident], dtype=np.int64)
    policy = np.array(emulation.policy(), dtype=np.uint64)
    failed = library().emulator_run(
        handle,
        ctypes.c_void_p(held.ctypes.data + start),
        ctypes.c_int64(len(parameters)),
        ctypes.c_char_p(code.global_memory),
        ctypes.c_int64(len(code.global_memory)),
        _pointer(ranges),
        ctypes.c_int64(len(ranges)),
        _pointer(shape),
        _pointer(policy),
        _pointer(counts),
        error,
        ctypes.c_int64(len(error)),
    )
    emulation.launched.append((kernel.name, int(counts[0]), int(counts[1])))
    if failed:
        raise EmulationError(f"{name} (seed {emulation.seed}): {_with_sources(error.value.decode(), code)}")


def _with_sources(text: str, code: Code) -> str:
    def name(found: re.Match[str]) -> str:
        source = code.lines.get(int(found[1]))
        return found[0] if source is None else f"{found[0]} ({source[0]}:{source[1]})"

    return _LINE.sub(name, text)
