"""`legato plan` and `legato quantize`: what a checkpoint needs, and writing it again in another format.

Owns what the terminal shows of both. Called by `legato.__main__`.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from legato.cli.loading import score_memory
from legato.config import GPU_SCORE_BYTES
from legato.model.checkpoint import Checkpoint
from legato.model.convert import Existing, Target, convert
from legato.model.footprint import plan
from legato.model.footprint_text import render, size


def show_plan(model: str, ranks: list[int], gpu_gigabytes: float) -> bool:
    """Prints the memory plan of a checkpoint, from its headers. False if it cannot run."""
    footprint = plan(model, ranks=ranks, gpu_bytes=round(gpu_gigabytes * 1e9))
    console = Console()
    console.print(render(footprint))
    if footprint.spec is not None:
        console.print(score_memory(GPU_SCORE_BYTES, footprint.spec.max_position), highlight=False)
    return footprint.refusal is None


def quantize(model: str, destination: Path, target: str, existing: Existing, shard_bytes: int) -> None:
    """Writes the checkpoint `model` into `destination` in another format, in shards of at most `shard_bytes`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("quantizing", total=None)

        def show(done_bytes: int, total_bytes: int, label: str) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes, description=label)

        written = convert(
            Checkpoint.open(model),
            destination,
            Target(target),
            shard_bytes=shard_bytes,
            existing=existing,
            progress=show,
        )
    print(
        f"{written.folder}: {len(written.files)} files, {size(written.total_bytes)}; {written.num_quantized} weights quantised "
        f"(relative error {written.error:.4f}), {written.num_kept} kept"
    )
