"""`legato doctor`: what works on this machine, what does not, and what to do about it.

Owns what the terminal shows and what counts as sick. Called by `legato.__main__`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches

from rich.console import Console

from legato.bench.doctor import Finding, OpHealth, health, machine
from legato.cli.bench import device_named
from legato.cli.tables import table
from legato.config import ConfigError
from legato.ops.catalog import FOLDERS
from legato.ops.op import registered

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fault": "[red]fault[/]"}


def run(device_name: str, only: Sequence[str], output: str) -> bool:
    """Examines this machine. False if something is broken: a package that is needed is missing, or an op is wrong.

    `only`: ops and folders of ops; none: all. Raises ConfigError for a device that is not there and for ops that do not exist.
    """
    known = {op.name for op in registered()} | set(FOLDERS)
    unknown = [name for name in only if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the folders are {', '.join(FOLDERS)}"
        raise ConfigError(f"no op or folder of ops is called {unknown[0]!r}; {hint}")
    device = device_named(device_name)
    findings = list(machine(device))
    console = Console(stderr=output == "json")
    if output == "text":
        _show_findings(console, findings)
    ops: list[OpHealth] = []
    with console.status("checking ops") as status:
        for found in health(device, only):
            ops.append(found)
            status.update(f"checking ops: {found.name} done")
    if output == "json":
        print(
            json.dumps({"machine": [one.fields() for one in findings], "ops": [one.fields() for one in ops]}, indent=2)
        )
    else:
        _show_ops(console, ops)
    return not any(one.verdict == "fault" for one in findings) and not any(one.wrong for one in ops)


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    for one in findings:
        console.print(f"{_MARKS[one.verdict]:>4}  [bold]{one.name}[/]  {one.found}", highlight=False)
        if one.remedy:
            console.print(f"      {one.remedy}", style="dim", highlight=False)


def _show_ops(console: Console, ops: Sequence[OpHealth]) -> None:
    roofline = any(one.roofline_percent is not None for one in ops)
    shown = table(("op", "runs here"), ("right", "us", *(("% roofline",) if roofline else ())), "timed on")
    shown.columns[0].no_wrap = shown.columns[1].no_wrap = True
    for one in ops:
        right = f"{one.num_cases - len(one.wrong)} of {one.num_cases}"
        shown.add_row(
            one.name,
            one.implementation,
            right if not one.wrong else f"[red]{right}[/]",
            f"{one.spread.median_us:.1f}" if one.spread else "",
            *([f"{one.roofline_percent:.0f}" if one.roofline_percent is not None else ""] if roofline else []),
            one.timed.name.removeprefix(one.name).strip(),
        )
    console.print(shown)
    for one in ops:
        for fault in one.wrong:
            console.print(f"[red]wrong[/]  {fault}", highlight=False)
        if one.wrong:
            console.print(
                f"      Go on with --op {one.name}=reference, and report this output.", style="dim", highlight=False
            )
