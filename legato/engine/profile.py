"""A trace of the engine's process, for chrome://tracing or Perfetto.

Owns the one recording that can go on at a time. Called by `engine.serving`, between two iterations.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class TraceProfiler:
    """`torch.profiler` over whole iterations: operators on the CPU, and kernels where there is a GPU."""

    def __init__(self) -> None:
        self._recording: profile | None = None
        self._folder = Path()

    def start(self, folder: str) -> None:
        """Starts a recording that will be written into `folder`, which is made if need be.

        Raises:
            RuntimeError: one is going on.
            OSError: the folder cannot be made or written to.
        """
        if self._recording is not None:
            raise RuntimeError("a profile is being recorded already; stop it first")
        self._folder = Path(folder).expanduser().absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self._folder, os.W_OK):
            raise PermissionError(f"{self._folder} cannot be written to")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._recording = profile(activities=activities)
        self._recording.start()

    def stop(self) -> str:
        """Ends the recording and writes it; returns the path of the file. Raises `RuntimeError` when none is going on."""
        if self._recording is None:
            raise RuntimeError("no profile is being recorded; start one first")
        recording, self._recording = self._recording, None
        recording.stop()
        path = self._folder / f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
        recording.export_chrome_trace(str(path))
        return str(path)
