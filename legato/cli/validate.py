"""`legato validate`: what the terminal shows of a first run against a server.

Owns the printing. Exit codes: 0 all passed (or not applicable), 1 something failed, 2 nobody could be asked. Called by
`legato.__main__`.
"""

from __future__ import annotations

import asyncio
import json

from rich.console import Console
from rich.table import Table

from legato.validate import acceptance
from legato.validate.check import Outcome
from legato.validate.run import Findings, Wanted, validate

STYLES = {"pass": "green", "fail": "bold red", "not applicable": "dim"}
WIDTH = 120
"""Columns where there is no terminal to ask."""
SHORT = {"pass": "PASS", "fail": "FAIL", "not applicable": "N/A"}


def run(wanted: Wanted, output: str) -> bool:
    """Asks the server everything and prints what it found: a table, or JSON. False where something failed."""
    console = Console(stderr=output == "json", highlight=False)
    if not console.is_terminal:
        console.width = WIDTH

    def said(outcome: Outcome) -> None:
        console.print(f"{SHORT[outcome.verdict]:4}  {outcome.name:22}  ", style=STYLES[outcome.verdict], end="")
        console.print(outcome.detail, markup=False, soft_wrap=True)
        if outcome.verdict == "fail":
            console.print(f"      guards against: {outcome.guards}", style="dim", markup=False)

    findings = asyncio.run(validate(wanted, said))
    if findings.accept:
        console.print(accept_table(findings))
    if output == "json":
        print(json.dumps(findings.as_json(), ensure_ascii=False, indent=2))
    count = {verdict: sum(one.verdict == verdict for one in findings.outcomes) for verdict in SHORT}
    console.print(
        f"{findings.model} at {findings.url}: {count['pass']} passed, {count['fail']} failed, "
        f"{count['not applicable']} not applicable",
        style="bold red" if findings.failed else "bold",
        markup=False,
    )
    return not findings.failed


def accept_table(findings: Findings) -> Table:
    """Measured and published accept lengths, side by side."""
    table = Table(title="accept length (tokens per iteration, greedy)", title_justify="left", caption=acceptance.SOURCE)
    for heading in ("prompts", "as", "published", "measured", "iterations", "accepted by position", ""):
        is_text = heading in ("prompts", "as", "accepted by position")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=is_text)
    for row in findings.accept:
        found = row.measured
        table.add_row(
            row.kind,
            row.like,
            f"{row.published:.2f}",
            "" if found is None else f"{found.accept_length:.2f}",
            "" if found is None else str(found.rounds),
            "" if found is None else " ".join(f"{share:.0%}" for share in found.positions),
            SHORT[row.verdict],
        )
    return table
