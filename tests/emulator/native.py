"""The machine in C++, compiled once and kept, and its functions.

Owns the compiler's command and the cache of what it made. Knows no PTX. Called by `launch`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = (
    *("-std=c++20", "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-march=native", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which("g++")


def cache_directory() -> Path:
    """Where compiled and translated code is kept between processes; nothing there is needed."""
    try:
        path = Path.home() / ".cache" / "legato" / "emulator"
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        path = Path(tempfile.gettempdir()) / f"legato-emulator-{os.getuid()}"
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


@cache
def _processor() -> str:
    """`-march=native` makes code for this processor only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        return platform.processor()


@cache
def library() -> ctypes.CDLL:
    """The machine. Raises RuntimeError where there is no g++, or with what it said."""
    found = compiler()
    if found is None:
        raise RuntimeError("the emulator needs g++")
    version = subprocess.run([found, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout
    headers = b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.h")))
    about = "\n".join([version, *_FLAGS, _processor()]).encode()
    sources, objects = sorted(_HERE.glob("*.cpp")), list[Path]()
    for source in sources:
        digest = hashlib.sha256(about + headers + source.read_bytes()).hexdigest()[:24]
        objects.append(cache_directory() / f"{source.stem}-{digest}.o")
    digest = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:24]
    shared = cache_directory() / f"emulator-{digest}.so"
    with (cache_directory() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes that need it do not all compile it
        for source, made in zip(sources, objects, strict=True):
            if not made.is_file() and not shared.is_file():
                _compile([found, *_FLAGS, "-c", str(source)], made)
        if not shared.is_file():
            _compile([found, "-shared", *map(str, objects)], shared)
    loaded = ctypes.CDLL(str(shared))
    loaded.emulator_instructions.restype = ctypes.c_char_p
    loaded.emulator_program.restype = ctypes.c_void_p
    return loaded


def _compile(command: list[str], made: Path) -> None:
    temporary = made.with_suffix(f".{os.getpid()}{made.suffix}")
    ran = subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{ran.stderr}")
    os.replace(temporary, made)


@cache
def signatures() -> dict[str, str]:
    """Instruction -> what its operands are."""
    listed = library().emulator_instructions().decode().splitlines()
    return {name: signature for name, _, signature in (line.partition(" ") for line in listed)}
