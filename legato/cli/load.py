"""`legato bench serve`: a load on a server, its progress while it runs, a table at the end, JSON lines always.

Owns what the terminal shows and the form of the record. Called by `legato.__main__`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from legato.bench.load.endpoint import Endpoint, Reply
from legato.bench.load.run import Load, Progress, Result, run
from legato.bench.load.statistics import Distribution, Limits, e2e_s, gaps_s, tpot_s, ttft_s
from legato.bench.record import Setting, append
from legato.cli.tables import table

REFRESH_PER_S = 4


def bench_serve(endpoint: Endpoint, load: Load, path: Path) -> bool:
    """Runs the load, prints the table and appends one JSON line per request and one for the run. False if a request failed."""
    console = Console()
    console.print(
        f"{endpoint.where}: {load.sessions} sessions, {load.arrivals.label}, {load.source.label}", style="dim"
    )
    result = run_with_progress(endpoint, load, console)
    console.print(latencies(result), totals(result), sep="\n")
    for line in remarks(result):
        console.print(line, style="yellow", highlight=False)
    append(path, records_of(result), Setting.here(torch.device("cpu")))
    console.print(f"every request: {path}", style="dim", highlight=False)
    return not result.summary.failed


def run_with_progress(endpoint: Endpoint, load: Load, console: Console) -> Result:
    """`run` with one line that says how far it is."""
    if not console.is_terminal:
        return run(endpoint, load)
    with Live(
        Text("waiting for the server"), console=console, refresh_per_second=REFRESH_PER_S, transient=True
    ) as live:
        return run(endpoint, load, lambda progress: live.update(Text(_line(progress))))


def _line(progress: Progress) -> str:
    seconds = max(perf_counter() - progress.started, 1e-9)
    failed = f", {progress.failed} failed" if progress.failed else ""
    return (
        f"{progress.done} done, {progress.sent - progress.done} running{failed}, "
        f"{progress.tokens} tokens, {progress.tokens / seconds:.1f} tokens/s, {seconds:.0f} s"
    )


def latencies(result: Result) -> Table:
    """What a user would feel, in milliseconds."""
    summary = result.summary
    shown = table(("milliseconds",), ("mean", "p50", "p90", "p99", "largest"))
    rows: Mapping[str, Distribution] = {
        "time to first token": summary.ttft,
        "time per token after it": summary.tpot,
        "between chunks": summary.chunk_gap,
        "whole reply": summary.e2e,
        "sent late by": summary.lag,
    }
    for name, found in rows.items():
        values = (found.mean, found.p50, found.p90, found.p99, found.largest)
        shown.add_row(name, *("-" if math.isnan(value) else f"{1000 * value:.1f}" for value in values))
    return shown


def totals(result: Result) -> Table:
    """Rates, counts and what the server says of its drafts."""
    shown = Table(box=None, show_header=False)
    for name, value in _totals(result).items():
        shown.add_row(name, value)
    return shown


def _totals(result: Result) -> dict[str, str]:
    summary, accept = result.summary, result.accept
    found = {
        "requests": f"{summary.requests}, {summary.failed} failed, in {summary.duration_s:.1f} s",
        "requests/s": f"{summary.requests_per_s:.2f}",
        "tokens in / cached / out": " / ".join(
            "-" if count is None else str(count)
            for count in (summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens)
        ),
        "tokens/s": "-" if summary.tokens_per_s is None else f"{summary.tokens_per_s:.1f}",
        "tokens/s of one user": _number(summary.user_tokens_per_s),
        "tokens per chunk": _number(summary.tokens_per_chunk),
        "accept length": "not offered by the server" if accept is None else f"{accept.value:.2f} ({accept.source})",
    }
    if summary.goodput_per_s is not None:
        limits = {name: limit for name, limit in asdict(result.load.limits or Limits()).items() if limit is not None}
        promise = ", ".join(f"{name.removesuffix('_s')} <= {1000 * limit:g} ms" for name, limit in limits.items())
        found["goodput/s"] = f"{summary.goodput_per_s:.2f} ({promise})"
    return found


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def remarks(result: Result) -> list[str]:
    """What a reader of the table must know and would not ask."""
    found: list[str] = []
    errors = sorted({reply.error for reply in result.replies if reply.error is not None})
    found += [f"failed: {error}" for error in errors[:5]]
    if result.summary.completion_tokens is None:
        found.append("The server counts no tokens: there is no time per token and no throughput.")
    if result.endpoint.usage != "continuous":
        found.append("The server does not say how many tokens a chunk carries: the first is taken for one token.")
    if result.load.source.is_random:
        found.append("Random words: accept length and speed with speculation say nothing about real text.")
    late, wait = result.summary.lag.p99, result.summary.ttft.p50
    if late > 0.1 * wait:
        found.append("This client sent requests late: it is itself too slow for this load, or the machine is busy.")
    return found


def records_of(result: Result) -> list[dict[str, Any]]:
    """One line per request, then one for the run, without the setting."""
    case = {
        "arrivals": result.load.arrivals.label,
        "prompts": result.load.source.label,
        "sessions": result.load.sessions,
        "max_tokens": result.endpoint.max_tokens,
        "temperature": result.endpoint.temperature,
        "api": result.endpoint.api,
        "extra": dict(result.endpoint.extra),
    }
    common = {"bench": "serve", "name": result.endpoint.model, "implementation": "http", "case": case}
    start = min(reply.scheduled for reply in result.replies)
    lines = [{**common, "request": _request(reply, start)} for reply in result.replies]
    accept = None if result.accept is None else asdict(result.accept)
    tpot = result.summary.tpot
    whole = {
        **common,
        "median_us": 1e6 * tpot.p50,
        "correct": None,  # a stranger's server: nothing to compare its tokens with
        "summary": result.summary.fields(),
        "accept_length": accept,
        "accept_length_simulated": False,
        "random_prompts": result.load.source.is_random,
    }
    return [*lines, whole]


def _request(reply: Reply, start: float) -> dict[str, Any]:
    return {
        "session": reply.session,
        "turn": reply.turn,
        "scheduled_s": reply.scheduled - start,
        "lag_s": reply.sent - reply.scheduled,
        "ttft_s": ttft_s(reply),
        "tpot_s": tpot_s(reply),
        "e2e_s": e2e_s(reply),
        "gaps_s": [round(gap, 6) for gap in gaps_s(reply)],
        "chunk_tokens": [chunk.tokens for chunk in reply.chunks],
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.completion_tokens,
        "finish_reason": reply.finish_reason,
        "error": reply.error,
    }
