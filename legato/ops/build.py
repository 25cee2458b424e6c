# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUnknownParameterType=false, reportPrivateUsage=false
"""CUDA C++ sources, compiled by NVRTC, kept on disk, loaded and launched.

Owns compilation, the cache of compiled objects and the launch on PyTorch's current stream. Knows no op. Imported only
by the implementation files of the ops (`sm90.py`) and by tests: `import legato.ops` never reaches cuda.core.

A kernel file declares its kernels once, at import, which touches no device::

    SOURCE = Source(Path(__file__).with_name("top_k.cu"), defines={"THREADS": 1024})
    KERNEL = Kernel(SOURCE, "top_k", shared_bytes=200_000, non_portable_cluster=True)
    LAUNCH = Launch(grid=(96,), block=(1024,), cluster=(16,), shared_bytes=200_000, programmatic=True)
    ...
    KERNEL(LAUNCH, scores, slots, 2048)      # compiled (or read from the cache) and loaded at the first call

Kernels are `extern "C"`. Variants of one source differ in `defines`. `#include "name.cuh"` is looked up beside the
source; CUDA's own headers (cuda_fp16.h, cuda_fp8.h, ...) are found by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

try:
    from cuda.bindings import driver, nvrtc
    from cuda.core import LaunchConfig, ObjectCode, Program, ProgramOptions, Stream, TensorMapDescriptor, launch
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle  # no public name in cuda.core 1.2
    from cuda.core.utils import StridedMemoryView
    from cuda.pathfinder import find_nvidia_header_directory
except ImportError as error:
    raise ImportError("Legato's CUDA kernels need its cuda extra: pip install 'legato[cuda]'") from error

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")


class BuildError(Exception):
    """A source that does not compile, headers that are missing, or a launch that the device cannot make."""


@dataclass(frozen=True)
class Source:
    """A .cu file and its macros. `max_registers` bounds the registers of a thread (None: as the source's own launch
    bounds say)."""

    path: Path
    defines: Mapping[str, int | str] = field(default_factory=dict[str, "int | str"])
    max_registers: int | None = None

    def files(self) -> tuple[Path, ...]:
        """The file and everything of ours that it includes, directly or not. Raises BuildError for a missing one."""
        found: list[Path] = []
        waiting = [self.path]
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            if not path.is_file():
                raise BuildError(f"{self.path} includes {path}, which does not exist")
            found.append(path)
            waiting += [path.parent / name for name in _INCLUDE.findall(path.read_text())]
        return tuple(found)


@dataclass(frozen=True)
class Usage:
    """What one kernel takes: registers of a thread, bytes of its stack frame and spills, static shared memory."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class Binary:
    """A compiled source: its cubin, and what each of its kernels takes."""

    cubin: bytes
    usage: Mapping[str, Usage]


class Store:
    """Compiled objects: in this process, and on disk under `directory` (None: nowhere).

    `compilations` counts what NVRTC had to compile: a server that is warm leaves it unchanged. A directory that cannot
    be written is named in one warning, and costs nothing but compiling again next time. While `noted` is a dict, kernels that
    its thread calls are noted there and not launched; every thread has its own.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.compilations = 0
        self._own = threading.local()
        self._held: dict[str, Binary] = {}

    @property
    def noted(self) -> dict[int, Kernel] | None:
        return getattr(self._own, "noted", None)

    @noted.setter
    def noted(self, kernels: dict[int, Kernel] | None) -> None:
        self._own.noted = kernels

    def binary(self, source: Source, arch: str) -> Binary:
        """`source` compiled for `arch` ("sm_90a"). Needs no GPU. Raises BuildError with the compiler's log."""
        key = _key(source, arch)
        if key not in self._held:
            found = self._read(key)
            if found is None:
                found = _compile(source, arch)
                self.compilations += 1
                self._write(key, found)
            self._held[key] = found
        return self._held[key]

    def compile_noted(self, arch: str) -> int:
        """Compiles the sources of all kernels that were noted, side by side: the compiler runs outside Python's lock. Returns how
        many had to be. Raises BuildError as `binary` does."""
        sources = {_key(kernel.source, arch): kernel.source for kernel in (self.noted or {}).values()}
        absent = {key: source for key, source in sources.items() if key not in self._held and self._read(key) is None}
        with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
            made = dict(zip(absent, pool.map(partial(_compile, arch=arch), absent.values()), strict=True))
        for key, binary in made.items():
            self._held[key] = binary
            self._write(key, binary)
        self.compilations += len(made)
        return len(made)

    def _read(self, key: str) -> Binary | None:
        if self.directory is None:
            return None
        try:
            header, _, cubin = (self.directory / f"{key}.cubin").read_bytes().partition(b"\n")
            described = json.loads(header)
            if described["sha256"] != hashlib.sha256(cubin).hexdigest():
                return None
            return Binary(cubin, {name: Usage(**usage) for name, usage in described["usage"].items()})
        except (OSError, ValueError, KeyError, TypeError):
            return None  # absent, cut short or of another form: compiled again and replaced

    def _write(self, key: str, made: Binary) -> None:
        if self.directory is None:
            return
        usage = {name: vars(used) for name, used in made.usage.items()}
        header = json.dumps({"sha256": hashlib.sha256(made.cubin).hexdigest(), "usage": usage}).encode()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=key)
            with os.fdopen(handle, "wb") as file:
                file.write(header + b"\n" + made.cubin)
            os.replace(temporary, self.directory / f"{key}.cubin")
        except OSError as error:
            warnings.warn(f"compiled kernels are not kept: {self.directory}: {error.strerror}", stacklevel=2)
            self.directory = None


def _home_cache() -> Path | None:
    with contextlib.suppress(RuntimeError):  # no home directory: nothing is kept on disk
        return Path.home() / ".cache" / "legato" / "kernels"
    return None


#: Where every kernel of this process comes from. The engine points `directory` where its configuration says.
STORE = Store(_home_cache())


def _key(source: Source, arch: str) -> str:
    """Hash of all that decides the compiled bytes: texts, macros, target, options, compiler."""
    digest = hashlib.sha256()
    for path in source.files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    options = [sorted((name, str(value)) for name, value in source.defines.items()), source.max_registers, arch]
    digest.update(json.dumps([*options, _nvrtc_version()]).encode())
    return digest.hexdigest()


def _nvrtc_version() -> tuple[int, int]:
    result, major, minor = nvrtc.nvrtcVersion()
    if int(result):
        raise BuildError(f"NVRTC does not answer ({result}); install 'legato[cuda]'")
    return int(major), int(minor)


def _header_directories() -> list[str]:
    found = [find_nvidia_header_directory(library) for library in ("cudart", "cccl")]
    if found[0] is None:
        raise BuildError("CUDA's headers were not found: install nvidia-cuda-runtime (in 'legato[cuda]'), or a toolkit")
    return [directory for directory in found if directory is not None]


def _compile(source: Source, arch: str) -> Binary:
    options = ProgramOptions(
        name=str(source.path),
        arch=arch,
        std="c++17",
        include_path=[str(source.path.parent), *_header_directories()],
        define_macro=[(name, str(value)) for name, value in sorted(source.defines.items())] or None,
        max_register_count=source.max_registers,
        ptxas_options=["-v"],
        no_cache=True,  # an answer from NVRTC's own cache comes without the log that `usage_in` reads
    )
    log = StringIO()
    try:
        compiled = Program(source.path.read_text(), "c++", options).compile("cubin", logs=log)
    except Exception as error:
        raise BuildError(f"{source.path.name} does not compile for {arch}:\n{error}") from error
    return Binary(bytes(compiled.code), usage_in(log.getvalue()))


def usage_in(log: str) -> dict[str, Usage]:
    """Kernel name -> what it takes, from ptxas's verbose log."""
    found: dict[str, Usage] = {}
    for block in log.split("Compiling entry function")[1:]:
        name = _ENTRY.search("Compiling entry function" + block)
        spills, used, shared = _SPILLS.search(block), _USED.search(block), _STATIC_SHARED.search(block)
        if name and spills and used:
            stack, stores, loads = (int(number) for number in spills.groups())
            found[name[1]] = Usage(int(used[1]), stack, stores, loads, int(shared[1]) if shared else 0)
    return found


def architecture(device: torch.device | int | None = None) -> str:
    """The target of a device, with its own instructions: "sm_90a" on an H100 or H200."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched. `grid` and `cluster` count thread blocks; `grid` is a multiple of `cluster`.

    `programmatic`: the kernel may start before its predecessor in the stream ends, and itself waits for it
    (griddepcontrol.wait). `cooperative`: all its blocks run at once, or the launch fails.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...] | None = None
    shared_bytes: int = 0
    programmatic: bool = False
    cooperative: bool = False


class Kernel:
    """One `extern "C"` function of a source. Called as kernel(launch, *arguments) on the current device and stream.

    Arguments: a Tensor or None passes its address; an int is a C int (32 bits, checked), a float a C float; ctypes
    numbers (c_int64, ...), numpy scalars and cuda.core's TensorMapDescriptor pass as they are. Nothing is synchronised,
    and a CUDA graph can capture the call. `shared_bytes`: the most dynamic shared memory that any launch asks for.
    """

    def __init__(self, source: Source, name: str, *, shared_bytes: int = 0, non_portable_cluster: bool = False) -> None:
        self.source = source
        self.name = name
        self.shared_bytes = shared_bytes
        self.non_portable_cluster = non_portable_cluster
        self._loaded: dict[int, Any] = {}
        self._streams: dict[int, Stream] = {}
        self._configs: dict[Launch, LaunchConfig] = {}

    def usage(self, arch: str) -> Usage:
        """What the kernel takes on `arch`; compiles it if need be, without a GPU."""
        return STORE.binary(self.source, arch).usage[self.name]

    def load(self) -> Any:
        """The kernel on the current device, compiled and loaded by the first call. Raises BuildError."""
        loaded = self._loaded.get(torch._C._cuda_getDevice())
        if loaded is None:
            torch.cuda.init()
            device = torch.cuda.current_device()
            binary = STORE.binary(self.source, architecture(device))
            try:
                loaded = ObjectCode.from_cubin(binary.cubin, name=self.name).get_kernel(self.name)
            except Exception as error:
                has = ", ".join(binary.usage)
                raise BuildError(
                    f"{self.source.path.name} gives no kernel {self.name} (it has {has}): {error}"
                ) from error
            for attribute, value in self._attributes():
                (result,) = driver.cuKernelSetAttribute(attribute, value, loaded.handle, driver.CUdevice(device))
                if int(result):
                    raise BuildError(f"{self.name}: {attribute.name} = {value} is refused by the device: {result.name}")
            self._loaded[device] = loaded
        return loaded

    def _attributes(self) -> Iterator[tuple[Any, int]]:
        names = driver.CUfunction_attribute
        # The same split for all: a multiprocessor changes it only when it is empty, so that a kernel with much shared memory
        # could not start beside one for which the driver chose a large L1.
        yield names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100
        if self.shared_bytes:
            yield names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.shared_bytes
        if self.non_portable_cluster:
            yield names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1

    def max_active_clusters(self, how: Launch) -> int:
        """How many clusters of such a launch run at once on the current device (blocks, for a launch without any)."""
        return int(self.load().occupancy.max_active_clusters(self._config(how), stream=self._stream()))

    def is_noted(self) -> bool:
        """Whether this thread's kernels are noted and not launched; this one is, if so."""
        if (noted := STORE.noted) is None:
            return False
        noted[id(self)] = self
        return True

    def __call__(self, how: Launch, *arguments: Any) -> None:
        if self.is_noted():
            return
        launch(self._stream(), self._config(how), self.load(), *map(_argument, arguments))

    def _stream(self) -> Stream:
        # What torch.cuda.current_stream() ends in; that one looks for devices in the environment first, at every launch.
        handle = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = Stream.from_handle(handle)
        return stream

    def _config(self, how: Launch) -> LaunchConfig:
        config = self._configs.get(how)
        if config is None:
            config = self._configs[how] = _launch_config(how)
        return config


def tensor_map(tensor: Tensor, box: Sequence[int], swizzle: int = 0) -> TensorMapDescriptor:
    """What the copy engine must know of a tensor: an argument of kernels, by value (`const __grid_constant__ CUtensorMap`).

    `box`: what one copy brings, in elements, of as many dimensions as the tensor has (1 to 5; the last one contiguous).
    `swizzle`: bytes of a row over which 16-byte pieces change places in shared memory: 0 (none), 32, 64 or 128. Elements
    beyond the tensor arrive as zeros. The map holds the tensor's address and not the tensor: whoever keeps maps does not keep
    memory. Raises ValueError for what the engine cannot describe.
    """
    kinds = {0: "NONE", 32: "SWIZZLE_32B", 64: "SWIZZLE_64B", 128: "SWIZZLE_128B"}
    if swizzle not in kinds:
        raise ValueError(f"tensor_map: a swizzle of {swizzle} bytes; there are {', '.join(map(str, kinds))}")
    described = cast("Mapping[str, Any]", tensor.__cuda_array_interface__)
    bare = SimpleNamespace(__cuda_array_interface__={**described, "version": 3})
    view = StridedMemoryView.from_cuda_array_interface(bare, stream_ptr=-1)  # -1: nothing waits for the tensor's values
    made = view.as_tensor_map(
        tuple(box), swizzle=getattr(TensorMapSwizzle, kinds[swizzle]), l2_promotion=TensorMapL2Promotion.L2_256B
    )
    assert isinstance(made, TensorMapDescriptor)
    return made


class TensorMaps:
    """Maps of matrix operands, in the 128-byte swizzle. Kept by what they describe, since making one takes the host longer than a
    launch: at most `most`, then all are made again."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._held: dict[tuple[Any, ...], TensorMapDescriptor] = {}

    def of(self, tensor: Tensor, box: tuple[int, ...]) -> TensorMapDescriptor:
        """See `tensor_map`. Elements of one or two bytes; of which type is the kernel's matter."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.itemsize, box, tensor.get_device())
        found = self._held.get(key)
        if found is None:
            if len(self._held) >= self._most:
                self._held.clear()
            words = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.float16)  # types that the engine has
            found = self._held[key] = tensor_map(words, box, swizzle=128)
        return found


def _launch_config(how: Launch) -> LaunchConfig:
    return LaunchConfig(
        grid=_clusters(how),
        cluster=None if how.cluster is None else _three(how.cluster),
        block=_three(how.block),
        shmem_size=how.shared_bytes,
        is_cooperative=how.cooperative,
        programmatic_stream_serialization=how.programmatic,
    )


def _clusters(how: Launch) -> tuple[int, ...]:
    """The grid as cuda.core counts it: in clusters, where there are any."""
    grid, cluster = _three(how.grid), _three(how.cluster or (1,))
    if any(blocks % size for blocks, size in zip(grid, cluster)):
        raise BuildError(f"a grid of {grid} blocks does not divide into clusters of {cluster}")
    return tuple(blocks // size for blocks, size in zip(grid, cluster))


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, 1, 1)[:3]


def _argument(value: Any) -> Any:
    convert = _CONVERSIONS.get(type(value))
    if convert is not None:
        return convert(value)
    kinds = () if isinstance(value, bool) else _CONVERSIONS.items()
    return next((convert(value) for kind, convert in kinds if isinstance(value, kind)), value)


def _c_int(value: int) -> ctypes.c_int32:
    if not -(1 << 31) <= value < 1 << 31:
        raise BuildError(f"{value} does not fit a C int; pass a ctypes.c_int64 to a 64-bit parameter")
    return ctypes.c_int32(value)


def _null(_: None) -> int:
    return 0


#: Type of an argument -> what the launch is given; others pass as they are. Looked up by exact type first: a prompt's pass has
#: 1,400 launches of eight arguments.
_CONVERSIONS: Mapping[type, Callable[[Any], Any]] = {
    Tensor: Tensor.data_ptr,
    int: _c_int,
    float: ctypes.c_float,
    NoneType: _null,
}
