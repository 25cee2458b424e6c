"""A checkpoint as a table of named tensors: safetensors headers, shard index and configuration, read without touching
the data.

Owns files and their consistency (missing, truncated, duplicated). Must not know what a tensor is for: that is
`legato.model.inventory`. Called by the loader, the memory plan and the quantiser. Data is memory-mapped and read tensor
by tensor on request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from legato.model.faults import CheckpointError, Problem
from legato.model.hub import open_source
from legato.model.source import Source

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}

_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


class Progress(Protocol):
    """Called as bytes arrive. `done_bytes` grows to `total_bytes`; `label` says what is being read."""

    def __call__(self, done_bytes: int, total_bytes: int, label: str) -> None: ...


def no_progress(done_bytes: int, total_bytes: int, label: str) -> None:
    """The silent `Progress`."""


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says of one tensor. `stored_name` is the name on disk, before the prefix is
    normalised."""

    stored_name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class Checkpoint:
    """Index of a checkpoint: configuration and `{tensor name: TensorInfo}` under normalised names (`model.` prefix,
    `lm_head.`).

    `open` reads configuration and headers only; `read` maps one tensor. A hub repository is fetched shard by shard, on
    first use.
    """

    source: Source
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _handles: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @classmethod
    def open(cls, where: str | Path, *, revision: str | None = None) -> Checkpoint:
        """Reads configuration, shard index and headers of a folder or a hub repository (`owner/name`, at `revision`).

        An existing path wins over a hub id of the same spelling. Raises `CheckpointError` naming the file and what to
        do.
        """
        return cls.of(open_source(where, revision))

    @classmethod
    def of(cls, source: Source) -> Checkpoint:
        """The checkpoint behind an explicit source."""
        config = _json_object(source, "config.json")
        if config is None:
            raise CheckpointError(
                Problem(
                    f"{source.label}/config.json",
                    "",
                    "the model configuration",
                    "no such file",
                    "Point at the folder that holds config.json and the *.safetensors files.",
                )
            )
        return cls(source, config, _collect(source, _shards(source)))

    @property
    def label(self) -> str:
        """Where the checkpoint comes from, for messages."""
        return self.source.label

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the headers."""
        return sum(info.nbytes for info in self.tensors.values())

    def file(self, name: str) -> Path:
        """Local path of a file of the checkpoint (fetched when remote)."""
        return self.source.path(name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, memory-mapped where the platform allows it: treat it as read-only. Raises
        `CheckpointError`."""
        return self._read(name, lambda handle, stored_name: handle.get_tensor(stored_name))

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of the tensor `name`; nothing else is read. Raises `CheckpointError`."""
        return self._read(name, lambda handle, stored_name: handle.get_slice(stored_name)[start:stop])

    def read_columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Columns `start` to `stop` of the matrix `name`, contiguous. Raises `CheckpointError`."""
        return self._read(name, lambda handle, stored_name: handle.get_slice(stored_name)[:, start:stop].contiguous())

    def _read(self, name: str, how: Callable[[Any, str], Any]) -> torch.Tensor:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                Problem(
                    self.label, name, "a tensor of that name", "none", "The checkpoint is incomplete: fetch it again."
                )
            )
        try:
            tensor = cast("torch.Tensor", how(self._handle(info.file), info.stored_name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                Problem(
                    info.file, info.stored_name, f"{info.nbytes} readable bytes", str(error), "Fetch the file again."
                )
            ) from error
        return tensor

    def close(self) -> None:
        """Drops the open files; tensors already read stay valid."""
        self._handles.clear()

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(str(self.source.path(file)), framework="pt", device="cpu")
        return self._handles[file]


def canonical_name(stored_name: str) -> str:
    """The name without a multimodal wrapper's prefix: `model.language_model.layers.0...` -> `model.layers.0...`."""
    for prefix, replacement in _PREFIXES:
        if stored_name.startswith(prefix):
            return replacement + stored_name[len(prefix) :]
    return stored_name


def _json_object(source: Source, name: str) -> dict[str, Any] | None:
    text = source.text(name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(Problem(name, "", "JSON", str(error), "Fetch the file again.")) from error
    if not isinstance(value, dict):
        raise CheckpointError(Problem(name, "", "a JSON object", type(value).__name__, "Fetch the file again."))
    return cast("dict[str, Any]", value)


def _shards(source: Source) -> dict[str, list[str]]:
    """`{shard file: names the index promises in it}`; the names are empty where there is no index."""
    index = _json_object(source, INDEX_FILE)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise CheckpointError(Problem(INDEX_FILE, "", "an object weight_map", "none", "Fetch the file again."))
        shards: dict[str, list[str]] = {}
        for name, file in cast("Mapping[str, str]", weight_map).items():
            shards.setdefault(file, []).append(name)
        return dict(sorted(shards.items()))
    files = [name for name in source.names() if name.endswith(".safetensors")]
    if not files:
        raise CheckpointError(
            Problem(
                source.label,
                "",
                f"{INDEX_FILE} or *.safetensors files",
                "none",
                "Only safetensors checkpoints are read; convert other formats first.",
            )
        )
    return {name: [] for name in ([SINGLE_FILE] if SINGLE_FILE in files else files)}


def _collect(source: Source, shards: Mapping[str, list[str]]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    problems: list[Problem] = []
    for file, promised in shards.items():
        try:
            header = source.header(file)
        except CheckpointError as error:
            problems.extend(error.problems)
            continue
        if header is None:
            found = (
                f"no such file (it should hold {len(promised)} tensors, the first is {promised[0]})"
                if promised
                else "no such file"
            )
            problems.append(
                Problem(
                    file,
                    "",
                    f"a shard listed in {INDEX_FILE}",
                    found,
                    "The download is incomplete: fetch the missing shard.",
                )
            )
            continue
        for name in promised:
            if name not in header:
                problems.append(
                    Problem(
                        file,
                        name,
                        f"the tensor, as {INDEX_FILE} says",
                        "no such tensor in the shard",
                        "Fetch shard and index again, from one revision.",
                    )
                )
        for info in _entries(file, header, problems):
            name = canonical_name(info.stored_name)
            if name in tensors:
                problems.append(
                    Problem(
                        file,
                        info.stored_name,
                        "each tensor once",
                        f"it in {tensors[name].file} too",
                        "Remove the file that does not belong, or fetch the checkpoint again.",
                    )
                )
                continue
            tensors[name] = info
    if problems:
        raise CheckpointError(*problems)
    return tensors


def _entries(file: str, header: Mapping[str, Any], problems: list[Problem]) -> list[TensorInfo]:
    """Header entries as `TensorInfo`; an entry whose bytes do not match its shape is reported."""
    infos: list[TensorInfo] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = entry["data_offsets"]
        count = 1
        for size in shape:
            count *= size
        item = ITEM_BYTES.get(dtype)
        if item is not None and count * item != end - start:
            problems.append(
                Problem(
                    file,
                    name,
                    f"{count * item} bytes for {dtype} {list(shape)}",
                    f"{end - start} bytes",
                    "The header is damaged: fetch the file again.",
                )
            )
            continue
        infos.append(TensorInfo(name, file, dtype, shape, end - start))
    return infos
