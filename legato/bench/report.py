"""One page that says what was measured, under which conditions, and what it does not show: self-contained HTML.

Owns the page. Numbers come from JSON lines, pictures from `legato.bench.plots`. Called by `legato bench report`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from legato.bench import plots, verdicts
from legato.bench.lines import Line, latest, of

_STYLE = """
:root { color-scheme: light; --ink: #1d2330; --soft: #5d6677; --line: #e2e5ea; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 72rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem } h2 { font-size: 1.2rem; margin: 2.6rem 0 .4rem }
h3 { font-size: 1.05rem; margin: 2rem 0 .4rem }
p, li { max-width: 54rem } .soft { color: var(--soft) } svg { max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: 13px; margin: .8rem 0; display: block; overflow-x: auto }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: bottom }
td { white-space: nowrap; vertical-align: top } td.words { white-space: normal; min-width: 7rem; max-width: 24rem }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums } code { font-size: 12px }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """How one benchmark is shown: what the picture says, the columns of its table, what it does not show, what it comes to."""

    bench: str
    title: str
    reading: str
    limits: str
    draw: Callable[[Sequence[Line]], Figure | list[Figure]]
    columns: tuple[tuple[str, Callable[[Line], Any]], ...]
    verdict: Callable[[Sequence[Line]], Sequence[str]] = lambda lines: ()


def _ms(kind: str, quantile: str) -> Callable[[Line], Any]:
    def value(line: Line) -> Any:
        found = line["summary"][kind][quantile]
        return None if found is None else 1e3 * found

    return value


def _accept(line: Line) -> Any:
    found = line.get("accept_length")
    return found["value"] if isinstance(found, dict) else found


def _ops(lines: Sequence[Line]) -> list[Figure]:
    """A picture of those whose roofline is known, if there are any."""
    known = [line for line in lines if line.get("correct") and line.get("roofline_percent")]
    return [plots.ops(known)] if known else []


SECTIONS = (
    Section(
        "pareto",
        "One user against all users",
        "Each curve is a number of drafts (K), each point a number of users who send one request after another. To the right, "
        "one user reads faster; further up, the device gives more tokens in all. Dashed: what memory alone would allow at the "
        "accept length that was measured.",
        "The roofline counts bytes only: no launches, no collectives, no arithmetic, no prefill. Users who wait for replies "
        "never overload a server; an open loop (bench serve --rate) does.",
        plots.pareto,
        (
            ("K", lambda line: line["k"]),
            ("users", lambda line: line["case"]["concurrency"]),
            ("tokens/s of one user", lambda line: line["user_tokens_per_s"]),
            ("tokens/s per device", lambda line: line["tokens_per_s_per_device"]),
            ("accept length", _accept),
            ("ms per iteration", lambda line: None if line["median_us"] is None else line["median_us"] / 1e3),
            ("median TTFT, ms", _ms("ttft", "p50")),
            ("failed", lambda line: line["summary"]["failed"]),
        ),
        verdicts.pareto,
    ),
    Section(
        "isl",
        "Length of the prompt",
        "Iteration time, accept length and their quotient, tokens per second, for one user whose prompt grows.",
        "One request at a time, greedy. The accept length belongs to the text that was measured.",
        plots.isl,
        (
            ("model", lambda line: line["name"]),
            ("on", lambda line: line["implementation"]),
            ("K", lambda line: line["k"]),
            ("prompt", lambda line: line["context"]),
            ("ms per iteration", lambda line: line["median_us"] / 1e3),
            ("% of roofline", lambda line: line.get("roofline_percent")),
            ("accept length", _accept),
            ("tokens/s", lambda line: line["tokens_per_s"]),
            ("first token, s", lambda line: line["prefill_s"]),
        ),
        verdicts.isl,
    ),
    Section(
        "slice",
        "One rank's share",
        "An iteration of one rank of a tensor-parallel group, on one device, by the engine's own code. Dashed: what the bytes of "
        "weights and caches need at the rate at which memory gives them.",
        "Other ranks: exchanges loop back and are modelled apart. Contexts are written, not prefilled. Weights may be drawn. "
        "Tokens per second follow from an accept length that was given, not measured.",
        plots.share,
        (
            ("model", lambda line: line["name"]),
            ("format", lambda line: line["case"].get("format", "as stored")),
            ("drafts", lambda line: line["case"].get("drafts")),
            ("dense", lambda line: line["case"].get("dense", "stored")),
            ("TP", lambda line: line["case"]["tp"]),
            ("layers", lambda line: line["case"]["layers"]),
            ("K", lambda line: line["k"]),
            ("users", lambda line: line["batch"]),
            ("context", lambda line: line["context"]),
            ("experts reached", lambda line: line["experts_reached"]),
            ("ms per iteration", lambda line: line["median_us"] / 1e3),
            ("bytes need, ms", lambda line: None if line["floor_us"] is None else line["floor_us"] / 1e3),
            ("exchanges, modelled, ms", lambda line: line["exchanges_modelled_us"] / 1e3),
            ("accept length", _accept),
            ("tokens/s, simulated", lambda line: line.get("tokens_per_s_simulated_with_exchanges")),
        ),
        lambda lines: verdicts.share(lines, plots.share_name),
    ),
    Section(
        "ablate",
        "What each decision is worth",
        "The same iteration with one design decision taken away: graphs cut, ops bound to other implementations, weights in "
        "other formats. Above 1, the decision pays.",
        "What others published was measured by them, on other machines, on their engine: it says what to expect.",
        plots.ablate,
        (
            ("taken away", lambda line: line["decision"]),
            ("in its place", lambda line: line["implementation"]),
            ("context", lambda line: line["context"]),
            ("ms per iteration", lambda line: line["median_us"] / 1e3),
            ("times the whole", lambda line: line["times"]),
            ("draft step, us", lambda line: line["draft_step_us"]),
            ("published", lambda line: line["claim"]),
        ),
        verdicts.ablate,
    ),
    Section(
        "serve",
        "A server under load",
        "Latencies count from the moment at which a request should have been sent; time per token leaves out the tokens of the "
        "first chunk, and tokens are the server's own count.",
        "One client machine; its own lateness is the column 'sent late'. With speculation a chunk carries several tokens.",
        plots.serve,
        (
            ("model", lambda line: line["name"]),
            ("load", lambda line: line["case"]["arrivals"]),
            ("prompts", lambda line: line["case"]["prompts"]),
            ("requests", lambda line: line["summary"]["requests"]),
            ("failed", lambda line: line["summary"]["failed"]),
            ("TTFT p50, ms", _ms("ttft", "p50")),
            ("TTFT p99, ms", _ms("ttft", "p99")),
            ("TPOT p50, ms", _ms("tpot", "p50")),
            ("tokens/s", lambda line: line["summary"]["tokens_per_s"]),
            ("accept length", _accept),
            ("goodput/s", lambda line: line["summary"]["goodput_per_s"]),
            ("sent late p99, ms", _ms("lag", "p99")),
        ),
    ),
    Section(
        "ops",
        "Kernels against their roofline",
        "Time per call in a replayed graph, and the share of the time that bytes and arithmetic allow. Results that were wrong "
        "have no bar.",
        "A kernel alone: what it costs between others is in the iteration's figures.",
        _ops,
        (
            ("op", lambda line: line["name"]),
            ("implementation", lambda line: line["implementation"]),
            ("case", lambda line: " ".join(f"{key}={value}" for key, value in line["case"].items())),
            ("us", lambda line: line.get("median_us")),
            ("% of roofline", lambda line: line.get("roofline_percent")),
            ("right", lambda line: {True: "yes", False: "no", None: "-"}[line.get("correct")]),
        ),
    ),
)


def page(lines: Sequence[Line]) -> str:
    """The whole page. Benchmarks that it has no section for are named at the end, not dropped silently."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Legato: measurements</title>",
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>",
        "<h1>Legato: measurements</h1>",
        f"<p class=soft>{_summary(lines)}</p>",
    ]
    for section in SECTIONS:
        measured = of(lines, section.bench)
        if measured:
            parts.append(f"<h2>{_text(section.title)}</h2><p>{_text(section.reading)}</p>")
        machines = sorted({_machine(line) for line in measured})
        for machine in machines:
            here = [line for line in measured if _machine(line) == machine]
            own = here if section.bench == "serve" else latest(here)
            parts += [f"<h3>{_text(machine)}</h3>"] if len(machines) > 1 else []
            parts += _section(section, own, len(here) - len(own))
    others = sorted({str(line["bench"]) for line in lines} - {section.bench for section in SECTIONS})
    if others:
        parts.append(f"<p class=soft>Not shown here: {_text(', '.join(others))}.</p>")
    return "\n".join(parts) + "\n</html>\n"


def _section(section: Section, lines: Sequence[Line], num_earlier: int) -> list[str]:
    conditions: list[tuple[str, Callable[[Line], Any]]] = [
        ("machine", _machine),
        ("commit", _commit),
        ("date", lambda line: line.get("date")),
        ("command", _command),
    ]
    shown = {tuple(_text(value(line)) for _, value in conditions) for line in lines}
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in sorted(shown))
    head = "".join(f"<th>{name}</th>" for name, _ in conditions)
    simulated = any(line.get("accept_length_simulated") for line in lines)
    warning = (
        "<p><strong>Some accept lengths are simulated: tokens per second follow from them.</strong></p>"
        if simulated
        else ""
    )
    verdict = "".join(f"<li>{_text(sentence)}</li>" for sentence in section.verdict(lines))
    earlier = f"<p class=soft>{num_earlier} earlier measurements of the same figures are left out.</p>"
    drawn = section.draw(lines)
    return [
        warning,
        f"<p><strong>In short</strong></p><ul>{verdict}</ul>" if verdict else "",
        *map(plots.svg, drawn if isinstance(drawn, list) else [drawn]),
        _table(section, lines),
        earlier if num_earlier else "",
        f"<p class=soft>What it does not show: {_text(section.limits)}</p>",
        f"<details><summary class=soft>Conditions</summary><table><tr>{head}</tr>{rows}</table></details>",
    ]


def _table(section: Section, lines: Sequence[Line]) -> str:
    words = [any(isinstance(value(line), str) for line in lines) for _, value in section.columns]
    head = "".join(
        f"<th{'' if wordy else ' class=number'}>{_text(name)}</th>"
        for (name, _), wordy in zip(section.columns, words, strict=True)
    )
    rows: list[str] = []
    for line in lines:
        cells = [_cell(value(line)) for _, value in section.columns]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"
    else:
        text = "-" if value is None else str(value)
    kind = "words" if isinstance(value, str) and len(value) > 24 else "word" if isinstance(value, str) else "number"
    return f"<td class={kind}>{_text(text)}</td>"


def _machine(line: Line) -> str:
    return str(line.get("gpu") or line.get("cpu") or "CPU")


def _commit(line: Line) -> str:
    return str(line.get("commit") or "-")[:12] + (" (with local changes)" if line.get("dirty") else "")


def _command(line: Line) -> str:
    return str(line.get("command") or "-")


def _summary(lines: Sequence[Line]) -> str:
    dates = sorted(str(line["date"])[:10] for line in lines if line.get("date"))
    machines = sorted({_machine(line) for line in lines})
    when = "" if not dates else f", {dates[0]}" if dates[0] == dates[-1] else f", {dates[0]} to {dates[-1]}"
    return _text(
        f"{len(lines)} measurements on {', '.join(machines)}{when}. Every figure stands in a JSON line beside its command."
    )


def _text(value: Any) -> str:
    return html.escape(str(value))
