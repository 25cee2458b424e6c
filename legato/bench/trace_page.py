"""A trace as one self-contained page: the figures, one iteration drawn to scale, and where its time goes. Two traces side by
side show what a change has brought.

Owns the page. Knows no profiler. Called by `legato bench trace`, `slice` and `ablate`.
"""

from __future__ import annotations

import html
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from legato.bench.attribution import OpTime
from legato.bench.trace import Figures, Share, Span

_STYLE = """
:root { color-scheme: light; --ink: #1d2330; --soft: #5d6677; --line: #e2e5ea; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 80rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem } .soft { color: var(--soft) }
svg { width: 100%; height: auto; background: #fafbfc; border: 1px solid var(--line) }
table { border-collapse: collapse; font-size: 13px } th, td { text-align: left; padding: .2rem .9rem .2rem 0 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } code { font-size: 12px; overflow-wrap: anywhere }
"""
WIDTH, ROW, STRIPES = 1600, 26, 12


@dataclass(frozen=True, slots=True)
class View:
    """One recording. `name`: what sets it apart from the others on the page; `iteration`: the spans of one iteration, in order of
    start; `largest`: as `trace.shares` gives them; `ops`: as `attribution.op_times` does, or none."""

    name: str
    figures: Figures
    iteration: Sequence[Span]
    largest: Sequence[Share]
    ops: Sequence[OpTime] = ()


def page(title: str, conditions: str, views: Sequence[View]) -> str:
    """The page's text, for one view or several; iterations of all of them are drawn to one scale."""
    longest = max(_length(view.iteration) for view in views)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p class=soft>{html.escape(conditions)}</p>{_facts(views)}",
    ]
    for view in views:
        parts += [
            f"<h2>One iteration{_of(view)}</h2><p class=soft>Each stripe continues the one above it; a colour is a kernel, "
            f"white is nothing. Point at a block for its name.</p>{_drawn(view.iteration, longest)}"
        ]
    for view in views:
        if view.ops:
            parts.append(f"<h2>Time above the roofline, by op{_of(view)}</h2>{_ops(view.ops)}")
        parts.append(f"<h2>Where the time goes, by kernel{_of(view)}</h2>{_table(view.largest)}")
    return "".join(parts)


def _facts(views: Sequence[View]) -> str:
    rows = (
        ("iteration", [f"{view.figures.iteration_us:,.1f} us" for view in views]),
        ("busy", [f"{view.figures.busy_percent:.2f} % of {view.figures.num_iterations} iterations" for view in views]),
        ("bubbles", [f"{100 - view.figures.busy_percent:.2f} %" for view in views]),
        (
            "between iterations",
            [f"{view.figures.gap_us:.1f} us (worst {view.figures.worst_gap_us:.1f})" for view in views],
        ),
        ("kernels", [f"{view.figures.kernels:,.0f} per iteration" for view in views]),
    )
    head = "".join(f"<th>{html.escape(view.name)}</th>" for view in views)
    body = "".join(f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in rows)
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _of(view: View) -> str:
    return f": {html.escape(view.name)}" if view.name else ""


def _length(spans: Sequence[Span]) -> int:
    return max(1, max(span.stop for span in spans) - spans[0].start)


def _drawn(spans: Sequence[Span], longest: int) -> str:
    """The iteration in stripes, to the scale at which one of `longest` nanoseconds fills them."""
    start, per_stripe = spans[0].start, -(-longest // STRIPES)
    blocks: list[str] = []
    for span in spans:
        at, stop = span.start - start, span.stop - start
        note = html.escape(f"{span.name[:160]}: {span.length / 1e3:.2f} us at {at / 1e3:.2f}")
        while at < stop:
            stripe, x = divmod(at, per_stripe)
            width = min(stop - at, per_stripe - x)
            left, across = WIDTH * x / per_stripe, max(0.4, WIDTH * width / per_stripe)
            blocks.append(
                f'<rect x="{left:.2f}" y="{stripe * ROW + 3}" width="{across:.2f}"'
                f' height="{ROW - 6}" fill="{_colour(span.name)}"><title>{note}</title></rect>'
            )
            at += width
    return f'<svg viewBox="0 0 {WIDTH} {STRIPES * ROW}" role="img">{"".join(blocks)}</svg>'


def _ops(ops: Sequence[OpTime]) -> str:
    rows = "".join(
        f"<tr><td class=n>{op.above_us:,.1f}</td><td class=n>{op.us:,.1f}</td><td class=n>{_number(op.floor_us)}</td>"
        f"<td class=n>{op.launches}</td><td>{html.escape(op.op)}</td>"
        f"<td><code>{html.escape(', '.join(name[:60] for name in op.kernels[:4]))}</code></td></tr>"
        for op in ops
    )
    head = (
        "<th class=n>us above</th><th class=n>us</th><th class=n>us its bytes need</th><th class=n>launches</th><th>op</th>"
        "<th>kernels</th>"
    )
    return (
        "<p class=soft>By how much an op's kernels moved the end of the iteration on, gaps before them included, against the "
        f"time in which memory gives the weights and cache entries that it must read.</p><table><tr>{head}</tr>{rows}</table>"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _table(largest: Sequence[Share]) -> str:
    total = sum(share.us for share in largest) or 1.0
    rows = "".join(
        f'<tr><td style="background:{_colour(share.name)}">&nbsp;</td><td class=n>{share.us:,.2f}</td>'
        f"<td class=n>{100 * share.us / total:.1f}</td><td class=n>{share.launches:.0f}</td>"
        f"<td class=n>{share.us / share.launches:.2f}</td><td><code>{html.escape(share.name[:200])}</code></td></tr>"
        for share in largest
    )
    head = (
        "<th></th><th class=n>us</th><th class=n>%</th><th class=n>launches</th><th class=n>us each</th><th>kernel</th>"
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _colour(name: str) -> str:
    """The same for the same name, on every page."""
    return f"hsl({zlib.crc32(name.encode()) % 360} 55% {52 + zlib.crc32(name[::-1].encode()) % 20}%)"
