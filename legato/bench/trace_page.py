"""A trace as one self-contained page: the figures, one iteration drawn to scale, and where its time goes.

Owns the page. Knows no profiler. Called by `legato bench trace`.
"""

from __future__ import annotations

import html
import zlib
from collections.abc import Sequence

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


def page(title: str, conditions: str, found: Figures, iteration: Sequence[Span], largest: Sequence[Share]) -> str:
    """The page's text. `iteration`: the spans of one iteration, in order of start; `largest`: as `trace.shares` gives them."""
    facts = (
        ("iteration", f"{found.iteration_us:,.1f} us"),
        ("busy", f"{found.busy_percent:.2f} % of {found.num_iterations} iterations"),
        ("bubbles", f"{100 - found.busy_percent:.2f} %"),
        ("between iterations", f"{found.gap_us:.1f} us (worst {found.worst_gap_us:.1f})"),
        ("kernels", f"{found.kernels:,.0f} per iteration"),
    )
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p class=soft>{html.escape(conditions)}</p><table>{rows}</table>"
        "<h2>One iteration</h2><p class=soft>Each stripe continues the one above it; a colour is a kernel, white is nothing. "
        f"Point at a block for its name.</p>{_drawn(iteration)}"
        f"<h2>Where the time goes</h2>{_table(largest)}"
    )


def _drawn(spans: Sequence[Span]) -> str:
    """The iteration in stripes, to scale."""
    start = spans[0].start
    total = max(1, max(span.stop for span in spans) - start)
    per_stripe = -(-total // STRIPES)
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
