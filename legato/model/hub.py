"""Checkpoints on a model hub: headers by range request, shards only when a tensor in them is read.

Owns the use of `huggingface_hub` (its cache, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, tokens). Must not know names, formats or
the model. Called by `legato.model.checkpoint` and by the command line's checks before torch is imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from legato.model.faults import CheckpointError, Problem
from legato.model.source import FolderSource, Source, read_header

# The HTTP client's own error and OSError: what the hub library lets through when a connection fails, whichever client
# it uses.
_CONNECTION = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(text: str) -> bool:
    """True for `owner/name`, the only form of hub id that is accepted."""
    return _HUB_ID.fullmatch(text) is not None


def open_source(where: str | Path, revision: str | None = None) -> Source:
    """The source behind a path or a hub id. An existing path wins; no connection is made yet. Raises `CheckpointError`
    for neither."""
    path = Path(where).expanduser()
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # no permission on the way there, or no possible path at all
        remedy = "Check the path, or give a hub id of the form owner/name."
        raise CheckpointError(Problem(str(path), "", "a folder or a hub id", str(error.strerror), remedy)) from error
    if is_folder:
        return FolderSource(path)
    if exists:
        raise CheckpointError(
            Problem(str(path), "", "a folder", "a file", "Point at the folder that holds config.json.")
        )
    if isinstance(where, str) and is_hub_id(where):
        return HubSource(where, revision)
    remedy = "Check the path, or give a hub id of the form owner/name."
    raise CheckpointError(Problem(str(where), "", "a folder or a hub id", "neither", remedy))


class HubSource:
    """One repository at one revision. The revision is resolved to a commit once, so that all files agree."""

    def __init__(self, repository: str, revision: str | None = None) -> None:
        self.repository = repository
        self.revision = revision or "main"
        self._api = HfApi()
        self._files: list[str] | None = None

    @property
    def label(self) -> str:
        return self.repository

    def names(self) -> list[str]:
        """Files at the top level; offline, those in the local cache."""
        if self._files is None:
            self._files = self._list()
        return self._files

    def text(self, name: str) -> str | None:
        if name not in self.names():
            return None
        return self.path(name).read_text(encoding="utf-8")

    def header(self, name: str) -> dict[str, Any] | None:
        """The header alone: from the cached file where there is one, otherwise by range request."""
        cached = try_to_load_from_cache(self.repository, name, revision=self.revision)
        if isinstance(cached, str):
            return read_header(Path(cached))
        if name not in self.names():
            return None
        try:
            metadata = self._api.parse_safetensors_file_metadata(self.repository, name, revision=self.revision)
        except SafetensorsParsingError as error:
            raise _fault(name, "a safetensors header", error, "The file in the repository is damaged.") from error
        except _CONNECTION as error:
            raise _fault(name, "a readable header", error, "Check the connection and try again.") from error
        header: dict[str, Any] = {}
        for tensor, info in metadata.tensors.items():
            header[tensor] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
        return header

    def path(self, name: str) -> Path:
        """Downloads one file into the hub's cache, or finds it there."""
        try:
            return Path(hf_hub_download(self.repository, name, revision=self.revision))
        except LocalEntryNotFoundError as error:
            raise _fault(
                name, "the file in the cache or a connection", error, "Connect, or fetch the model beforehand."
            ) from error
        except EntryNotFoundError as error:
            raise _fault(name, "the file in the repository", error, "The repository is incomplete.") from error
        except _CONNECTION as error:
            raise _fault(
                name, "a complete download", error, "Check the connection and the free disk space, then try again."
            ) from error

    def _list(self) -> list[str]:
        try:
            info = self._api.model_info(self.repository, revision=self.revision)
        except GatedRepoError as error:
            raise self._refused("access to a gated repository", error, "Accept its terms and set HF_TOKEN.") from error
        except RepositoryNotFoundError as error:
            raise self._refused("a repository on the hub", error, "Check the spelling, or give a folder.") from error
        except RevisionNotFoundError as error:
            raise self._refused(f"revision {self.revision}", error, "Check the revision.") from error
        except HFValidationError as error:
            raise self._refused("a hub id of the form owner/name", error, "Check the spelling.") from error
        except _CONNECTION as error:
            return self._cached(error)
        files = sorted(entry.rfilename for entry in info.siblings or [] if "/" not in entry.rfilename)
        if info.sha and info.sha != self.revision:
            if "config.json" in files:
                self.path("config.json")  # by its branch, which the cache then knows when there is no connection
            self.revision = info.sha
        return files

    def _cached(self, error: Exception) -> list[str]:
        """Names of the snapshot in the local cache, for use without a connection."""
        found = try_to_load_from_cache(self.repository, "config.json", revision=self.revision)
        if not isinstance(found, str):
            raise self._refused(
                "a reachable hub or a cached copy", error, "Check the connection, or give a folder."
            ) from error
        return sorted(entry.name for entry in Path(found).parent.iterdir())

    def _refused(self, expected: str, error: Exception, remedy: str) -> CheckpointError:
        return _fault(self.repository, expected, error, remedy)


def _fault(file: str, expected: str, error: Exception, remedy: str) -> CheckpointError:
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return CheckpointError(Problem(file, "", expected, first_line, remedy))
