"""Where the files of a checkpoint are, and what their safetensors headers say.

Owns reading headers without touching the data. Must not know names, formats or the model. Called by
`legato.model.checkpoint`; `legato.model.hub` is the other source.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Protocol, cast

from legato.model.faults import CheckpointError, Problem

MAX_HEADER_BYTES = 100_000_000


class Source(Protocol):
    """Where the files of a checkpoint are: a folder, or a hub repository."""

    @property
    def label(self) -> str: ...

    def names(self) -> list[str]:
        """Names of the files at the top level."""
        ...

    def text(self, name: str) -> str | None:
        """Content of a small text file, or None where there is none."""
        ...

    def header(self, name: str) -> dict[str, Any] | None:
        """Parsed safetensors header, or None where the file is missing. Raises `CheckpointError` for a damaged file."""
        ...

    def path(self, name: str) -> Path:
        """Local path of a file, fetching it first where the source is remote."""
        ...


class FolderSource:
    """A local directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def label(self) -> str:
        return str(self.folder)

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.folder.iterdir() if entry.is_file())
        except OSError as error:
            raise _unreadable(str(self.folder), error) from error

    def text(self, name: str) -> str | None:
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(name, error) from error

    def header(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return read_header(path) if path.is_file() else None

    def path(self, name: str) -> Path:
        return self.folder / name


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""What a file starts with that stands in a clone made without Git LFS. As a header's length it would be absurd."""


def read_header(path: Path) -> dict[str, Any]:
    """Parses the header of one safetensors file and checks it against the file's size.

    Layout: 8 bytes little-endian header length n, n bytes of JSON, then the data that `data_offsets` point into
    (https://github.com/huggingface/safetensors#format). Raises `CheckpointError` for truncated or foreign content.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if prefix == LFS_POINTER[:8]:
            remedy = "Fetch the files themselves: git lfs pull in the clone, or the hub's own download."
            raise CheckpointError(Problem(path.name, "", "a safetensors header", "a pointer of Git LFS", remedy))
        if len(prefix) < 8:
            raise _truncated(path.name, "an 8-byte header length", f"{size} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                Problem(
                    path.name,
                    "",
                    "a safetensors header",
                    f"a header length of {length}",
                    "This is not a safetensors file.",
                )
            )
        if 8 + length > size:
            raise _truncated(path.name, f"a header of {length} bytes", f"a file of {size} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(
            Problem(path.name, "", "a safetensors header in JSON", str(error), "Fetch the file again.")
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(
            Problem(path.name, "", "a safetensors header object", type(header).__name__, "Fetch the file again.")
        )
    header = cast("dict[str, Any]", header)
    try:
        entries = [(name, int(entry["data_offsets"][1])) for name, entry in header.items() if name != "__metadata__"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        found = f"an entry without them ({error!r})"
        raise CheckpointError(
            Problem(path.name, "", "data_offsets for every tensor", found, "Fetch the file again.")
        ) from error
    name, end = max(entries, key=lambda entry: entry[1], default=("", 0))
    if 8 + length + end > size:
        raise _truncated(path.name, f"{8 + length + end} bytes (up to the end of {name})", f"{size} bytes")
    return header


def _unreadable(file: str, error: Exception) -> CheckpointError:
    if isinstance(error, UnicodeDecodeError):
        return CheckpointError(Problem(file, "", "text in UTF-8", str(error), "Write the file again in UTF-8."))
    return CheckpointError(Problem(file, "", "a readable file", str(error), "Check the permissions and the disk."))


def _truncated(file: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(Problem(file, "", expected, found, "The file is truncated: fetch it again."))
