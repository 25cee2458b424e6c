"""`legato bench trace`: the steady state on the terminal, and where its pictures lie.

Owns what the terminal shows. Called by `cli.bench_commands`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from legato.bench.record import Setting, append
from legato.bench.trace_run import Wanted, record
from legato.cli.tables import table
from legato.config import Config, ConfigError


def bench_trace(config: Config, wanted: Wanted, folder: Path, path: Path | None, shown: int) -> None:
    """Records, prints the figures and the largest `shown` kernels. Raises `ConfigError`, as `trace_run.record` does."""
    if not torch.cuda.is_available():
        raise ConfigError("bench trace records what a GPU does, and PyTorch sees none here")
    console, setting = Console(), Setting.here(torch.device("cuda"))
    conditions = f"{setting.gpu}, driver {setting.driver}, {setting.clocks}, commit {setting.commit}, {setting.date}"
    found, num_drafts = record(config, wanted, folder, conditions)
    if path is not None:
        append(path, [found.fields(wanted, num_drafts)], setting)
    figures = found.figures
    console.print(conditions, style="dim", highlight=False)
    console.print(
        f"iteration {figures.iteration_us:,.1f} us, busy {figures.busy_percent:.2f} %, gap {figures.gap_us:.1f} us (worst "
        f"{figures.worst_gap_us:.1f}), {figures.kernels:,.0f} kernels; a turn takes {found.turn_us:,.1f} us unrecorded; "
        f"accept length {found.accept_length:.2f}",
        highlight=False,
    )
    waited = ", ".join(f"{count} x {name}" for name, count in {**found.waits, **found.allocations}.items())
    console.print(f"the host waited or allocated: {waited or 'never'}", highlight=False)
    listed = table((), ("us", "launches", "us each"), "kernel")
    for share in found.shares[:shown]:
        listed.add_row(f"{share.us:.1f}", f"{share.launches:.0f}", f"{share.us / share.launches:.2f}", share.name[:90])
    console.print(listed)
    console.print(f"{folder / 'trace.html'}, {folder / 'trace.json.gz'} (ui.perfetto.dev)", highlight=False)
