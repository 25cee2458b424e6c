"""Pictures of measurements, from their JSON lines.

Owns what is drawn and its look; needs matplotlib, the extra `plots`. Nothing is measured or computed here but medians. Called by
`legato bench pareto`, `isl`, `slice`, `ablate`, `timeline` and `report`.
"""

# pyright: basic
from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from legato.bench.lines import Line
from legato.config import ConfigError

try:
    import matplotlib
    import matplotlib.dates

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.figure import Figure
except ImportError as error:  # the extra is not installed: say so where a picture is asked for
    raise ConfigError("pictures need matplotlib: pip install 'legato[plots]'") from error

COLOURS = ("#3564c4", "#c4553b", "#3a8f5c", "#8a5fb0", "#b58a2c", "#4f9fb5", "#6b6b6b", "#c76a9b")
LONGEST_BAR = 3.0
"""Times the iteration as it is; longer bars are cut there, hatched."""
MOST_CURVES = 8
"""In a panel of the history."""
History = tuple[str, Sequence[tuple[str, float]]]
"""A name, and what was measured when."""
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


def _new(columns: int = 1, height: float = 4.2) -> tuple[Figure, Any]:
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(1, columns, figsize=(6.4 * columns, height), layout="constrained", squeeze=False)
    return figure, axes[0]


def pareto(lines: Sequence[Line]) -> Figure:
    """Tokens/s of all users per device against tokens/s of one user, a curve per number of drafts, the roofline dashed."""
    figure, (axis,) = _new(height=5)
    for colour, (drafts, points) in zip(_cycle(), _grouped(lines, "k"), strict=False):
        points = sorted(points, key=lambda line: line["case"]["concurrency"])
        name = "K as the server has it" if drafts is None else f"K = {drafts}"
        x, y = ([line[key] for line in points] for key in ("user_tokens_per_s", "tokens_per_s_per_device"))
        axis.plot(x, y, "o-", color=colour, label=name)
        for line in points:
            users = line["case"]["concurrency"]
            axis.annotate(
                f"{users}", (line["user_tokens_per_s"], line["tokens_per_s_per_device"]), xytext=(5, 4),
                textcoords="offset points", fontsize=8, color=colour,
            )  # fmt: skip
        bounds = [line["roofline"] for line in points if line.get("roofline")]
        if bounds:
            x, y = ([one[key] for one in bounds] for key in ("user_tokens_per_s", "tokens_per_s_per_device"))
            axis.plot(x, y, "--", color=colour, alpha=0.6, label=f"memory roofline, {name}")
    axis.set(xlabel="tokens/s of one user (median)", ylabel="tokens/s of all users, per device")
    if _far_apart(lines):
        axis.set(xscale="log", yscale="log")
    else:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    axis.legend(fontsize=9)
    axis.set_title("Small numbers: users at a time. Up and to the right is better.", fontsize=10, loc="left")
    return figure


def _far_apart(lines: Sequence[Line]) -> bool:
    """Whether the roofline would press the measured points into a corner of linear axes."""
    key = "tokens_per_s_per_device"
    bounds = [line["roofline"][key] for line in lines if line.get("roofline")]
    return bool(bounds) and max(bounds) > 6 * max(line[key] for line in lines)


def isl(lines: Sequence[Line]) -> Figure:
    """Iteration time, accept length and tokens/s over the length of the prompt."""
    figure, axes = _new(3)
    names = sorted({(line["name"], line["implementation"], line["k"]) for line in lines})
    for colour, name in zip(_cycle(), names, strict=False):
        own = sorted(
            (line for line in lines if (line["name"], line["implementation"], line["k"]) == name),
            key=lambda line: line["context"],
        )
        label = f"{name[0]}, {name[1]}, K = {name[2]}"
        x = [line["context"] for line in own]
        axes[0].plot(x, [line["median_us"] / 1e3 for line in own], "o-", color=colour, label=label)
        floors = [line.get("floor_us") for line in own]
        if None not in floors:
            milliseconds = [float(floor or 0) / 1e3 for floor in floors]
            axes[0].plot(x, milliseconds, "--", color=colour, alpha=0.6, label="memory roofline")
        axes[1].plot(x, [line["accept_length"] for line in own], "o-", color=colour)
        axes[2].plot(x, [line["tokens_per_s"] for line in own], "o-", color=colour)
    for axis, title in zip(axes, ("ms per iteration", "accept length", "tokens/s, one user"), strict=True):
        _context_axis(axis)
        axis.set(xlabel="tokens of the prompt")
        axis.set_ylim(bottom=0)
        axis.set_title(title, loc="left", fontsize=10)
    axes[0].legend(fontsize=8)
    return figure


def share(lines: Sequence[Line]) -> list[Figure]:
    """One rank's share: over the context where that varies, one user against all users where their number does, and bars for
    figures of which nothing else varies."""
    contexts, users, rest = list[Line](), list[Line](), list[Line]()
    for _, of_one in _by_name(lines, share_name):
        varies = len({line["context"] for line in of_one}) > 1
        (contexts if varies else rest).extend(of_one)
    for _, of_one in _by_name(rest, lambda line: f"{share_name(line, 'users')} {line['context']}"):
        if len({line["batch"] for line in of_one}) > 1:
            users += of_one
    rest = [line for line in rest if line not in users]
    drawn = ((share_by_context, contexts), (share_by_users, users), (share_bars, rest))
    return [draw(own) for draw, own in drawn if own]


def share_bars(lines: Sequence[Line]) -> Figure:
    """Milliseconds per iteration, and what its bytes need in a darker shade."""
    figure, (axis,) = _new(height=max(2.0, 0.36 * len(lines) + 1))
    names: list[str] = []
    for number, line in enumerate(reversed(lines)):
        milliseconds = line["median_us"] / 1e3
        axis.barh(number, milliseconds, color=COLOURS[0], alpha=0.45)
        if line["floor_us"]:
            axis.barh(number, line["floor_us"] / 1e3, color=COLOURS[0])
        axis.annotate(
            f" {milliseconds:.2f}", (milliseconds, number), xytext=(2, -3), textcoords="offset points", fontsize=8
        )
        names.append(f"{share_name(line)}, {line['context']:,}")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlim(0, 1.15 * max(line["median_us"] for line in lines) / 1e3)
    figure.suptitle("ms per iteration (dark: what its bytes need)", x=0.01, ha="left", fontsize=10)
    axis.grid(axis="y", visible=False)
    return figure


def share_by_context(lines: Sequence[Line]) -> Figure:
    """Iteration time over the context, the bytes' floor dashed, and tokens/s where an accept length was given."""
    has_tokens = all("tokens_per_s_simulated" in line for line in lines)
    figure, axes = _new(1 + has_tokens, height=4.6)
    for colour, (name, points) in zip(_cycle(), _by_name(lines, share_name), strict=False):
        points = sorted(points, key=lambda line: line["context"])
        x = [line["context"] for line in points]
        axes[0].plot(x, [line["median_us"] / 1e3 for line in points], "o-", color=colour, label=name)
        if all(line["floor_us"] for line in points):
            axes[0].plot(x, [line["floor_us"] / 1e3 for line in points], "--", color=colour, alpha=0.6)
        if has_tokens:
            for key, style in (("tokens_per_s_simulated", "-"), ("tokens_per_s_simulated_with_exchanges", ":")):
                axes[1].plot(x, [line[key] for line in points], f"o{style}", color=colour)
    titles = [
        "ms per iteration (dashed: what its bytes need)",
        "tokens/s of one user, SIMULATED (dotted: exchanges modelled)",
    ]
    for axis, title in zip(axes, titles, strict=False):
        _context_axis(axis)
        axis.set_ylim(bottom=0)
        axis.set_title(title, loc="left", fontsize=10)
    axes[0].legend(fontsize=8)
    return figure


def share_by_users(lines: Sequence[Line]) -> Figure:
    """Tokens/s of all users per GPU against tokens/s of one, for the accept length that was given; without one, iterations/s."""
    has_tokens = all("tokens_per_s_simulated" in line for line in lines)
    figure, (axis,) = _new(height=5)
    for colour, (name, points) in zip(_cycle(), _by_name(lines, lambda line: share_name(line, "users")), strict=False):
        points = sorted(points, key=lambda line: line["batch"])
        tokens = [line["accept_length"] if has_tokens else 1.0 for line in points]
        for key, style in (("median_us", "o-"), ("floor_us", "--")):
            if all(line[key] for line in points):
                one = [1e6 * count / line[key] for count, line in zip(tokens, points, strict=True)]
                of_all = [rate * line["batch"] / line["case"]["tp"] for rate, line in zip(one, points, strict=True)]
                label = name if key == "median_us" else None
                axis.plot(one, of_all, style, color=colour, alpha=1.0 if label else 0.5, label=label)
                if label:
                    for x, y, line in zip(one, of_all, points, strict=True):
                        axis.annotate(
                            str(line["batch"]),
                            (x, y),
                            xytext=(5, 4),
                            textcoords="offset points",
                            fontsize=8,
                            color=colour,
                        )
    what = "tokens/s (SIMULATED accept length)" if has_tokens else "iterations/s"
    axis.set(xlabel=f"{what} of one user", ylabel=f"{what} of all users, per GPU", yscale="log")
    axis.set_xlim(left=0)
    axis.legend(fontsize=8)
    title = "Numbers: users at a time. Dashed: what bytes allow. Upper right is better."
    axis.set_title(title, fontsize=10, loc="left")
    return figure


def _context_axis(axis: Any) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(
        lambda tokens, _: (
            f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}K" if tokens < 1 << 20 else f"{tokens / 2**20:g}M"
        )
    )
    axis.set(xlabel="tokens of context")


def share_name(line: Line, varied: str = "") -> str:
    """What tells a curve from the others: format, ranks, drafts, users, experts."""
    case = line["case"]
    words = [str(case.get("format", "")).upper(), f"TP {case['tp']}", f"{case['layers']} layers", f"K = {line['k']}"]
    words += [f"{case['drafts']} drafts"] if case.get("drafts", "stored") != "stored" else []
    words += [f"dense {case['dense'].upper()}"] if case.get("dense", "stored") != "stored" else []
    words += [f"{line['distinct_experts']:g} experts"] if line["distinct_experts"] else []
    words += [f"{line['batch']} users"] if varied != "users" and line["batch"] > 1 else []
    return ", ".join(word for word in words if word)


def _by_name(lines: Sequence[Line], name: Callable[[Line], str]) -> list[tuple[str, list[Line]]]:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(name(line), []).append(line)
    return list(groups.items())


def ablate(lines: Sequence[Line]) -> Figure:
    """How much longer an iteration is without each decision; beside it a draft step over the context, sharing or not."""
    steps = [line for line in lines if line.get("draft_step_us")]
    figure, axes = _new(1 + bool(steps), height=max(3.4, 0.34 * len(lines) + 1))
    shown = [line for line in lines if line["implementation"] != "as it is"][::-1]
    longest = min(LONGEST_BAR, max((line["times"] for line in shown), default=1.0))
    for number, line in enumerate(shown):
        colour, end = COLOURS[0 if line["times"] >= 1 else 2], min(line["times"], longest)
        axes[0].barh(number, end - 1, left=1, color=colour, hatch="//" if line["times"] > longest else None)
        label = f" {line['times']:.2f} ({line['median_us'] / 1e3:.2f} ms)"
        axes[0].annotate(label, (max(end, 1), number), xytext=(3, -3), textcoords="offset points", fontsize=8)
    names = [f"{line['decision']}: {line['implementation']}, {line['context']:,}" for line in shown]
    axes[0].set_yticks(range(len(shown)), names, fontsize=8)
    axes[0].axvline(1, color="#1d2330", linewidth=1)
    axes[0].set_xlim(0, 1.3 * longest)
    axes[0].set_title("times the iteration as it is (1.00)", loc="left", fontsize=10)
    axes[0].grid(axis="y", visible=False)
    if steps:
        for colour, (variant, points) in zip(_cycle(), _grouped(steps, "implementation"), strict=False):
            points = sorted(points, key=lambda line: line["context"])
            x = [line["context"] for line in points]
            axes[1].plot(x, [line["draft_step_us"] for line in points], "o-", color=colour, label=variant)
        _context_axis(axes[1])
        axes[1].set_ylim(bottom=0)
        axes[1].set_title("us of a draft step", loc="left", fontsize=10)
        axes[1].legend(fontsize=8)
    return figure


def serve(lines: Sequence[Line]) -> Figure:
    """Median and p99 of each latency, a group of bars per run."""
    figure, axes = _new(3)
    kinds = (("ttft", "time to first token"), ("tpot", "time per token after it"), ("e2e", "whole reply"))
    for axis, (kind, title) in zip(axes, kinds, strict=True):
        for number, line in enumerate(lines):
            found = line["summary"][kind]
            for offset, quantile, shade in ((-0.2, "p50", 1.0), (0.2, "p99", 0.45)):
                if found[quantile] is not None:
                    axis.bar(number + offset, 1e3 * found[quantile], 0.36, color=COLOURS[0], alpha=shade)
        axis.set_xticks(range(len(lines)), [f"{number + 1}" for number in range(len(lines))])
        axis.set_title(f"{title}, ms (dark: median, light: p99)", loc="left", fontsize=10)
        axis.set_xlabel("run (see the table)")
    return figure


def ops(lines: Sequence[Line]) -> Figure:
    """Share of the roofline per case, best first; only results that were right."""
    right = sorted(
        (line for line in lines if line.get("correct") and line.get("roofline_percent")),
        key=lambda line: line["roofline_percent"],
    )
    figure, (axis,) = _new(height=max(2.5, 0.24 * len(right) + 1))
    targets = sorted({line["implementation"] for line in right})
    for number, line in enumerate(right):
        axis.barh(number, line["roofline_percent"], color=COLOURS[targets.index(line["implementation"]) % len(COLOURS)])
        axis.annotate(
            f"{line['median_us']:.1f} us", (line["roofline_percent"], number), xytext=(3, -3), textcoords="offset points",
            fontsize=7,
        )  # fmt: skip
    axis.set_yticks(range(len(right)), [f"{line['name']} {_words(line['case'])}" for line in right], fontsize=7)
    for target, colour in zip(targets, _cycle(), strict=False):
        axis.barh(0, 0, color=colour, label=target)
    figure.legend(loc="outside upper left", fontsize=8, ncols=4)
    axis.set(xlabel="% of roofline")
    axis.grid(axis="y", visible=False)
    return figure


def speed_up(lines: Sequence[Line]) -> Figure:
    """How many times as fast as each other implementation the first one is, over the rows of a case: a curve per shape that was
    measured at more than three numbers of rows, points for the others, in black the geometric mean where at least half of
    the shapes were."""
    figure, axes = _new(2, height=4.6)
    first = lines[0]["implementation"] if lines else ""
    for axis, key, title in zip(
        axes, ("median_us", "isolated_us"), ("one call after the other", "between other kernels"), strict=True
    ):
        found = _ratios(lines, first, key)
        colours = iter(_cycle())
        for name, points in found.items():
            x, y = zip(*sorted(points.items()))
            if len(points) > 3:
                axis.plot(x, y, "o-", color=next(colours), markersize=4, label=name)
            else:
                axis.plot(x, y, ".", color="#b0b0b0", markersize=4)
        rows = sorted({count for points in found.values() for count in points})
        at = {count: [points[count] for points in found.values() if count in points] for count in rows}
        # A mean over a few of the shapes would be no mean of what the others show.
        enough = max(map(len, at.values()), default=0) / 2
        means = {count: geometric_mean(ratios) for count, ratios in at.items() if len(ratios) >= enough}
        axis.plot(list(means), list(means.values()), "D", color="black", markersize=5, label="geometric mean of all")
        for count, mean in means.items():
            axis.annotate(
                f"{mean:.2f}", (count, mean), xytext=(0, 7), textcoords="offset points", fontsize=7, ha="center"
            )
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(count) for count in rows], fontsize=7)
        axis.minorticks_off()
        axis.set(xlabel="rows", ylabel=f"times as fast, {first}", ylim=(0, None))
        axis.set_title(title, loc="left", fontsize=10)
    if axes[0].lines:
        axes[0].legend(fontsize=7)
    return figure


def _ratios(lines: Sequence[Line], first: str, key: str) -> dict[str, dict[int, float]]:
    """Per op, shape and other implementation, by rows: its time over the first one's; right results only."""
    times: dict[tuple[str, int, str], float] = {}
    for line in lines:
        case = dict(line["case"])
        if line.get("correct") and line.get(key) and "rows" in case:
            rows = case.pop("rows")
            times[f"{line['name']} {_words(case)}", rows, line["implementation"]] = line[key]
    found: dict[str, dict[int, float]] = {}
    for (name, rows, implementation), time in times.items():
        ours = times.get((name, rows, first))
        if implementation != first and ours is not None:
            found.setdefault(f"{name} / {implementation}", {})[rows] = time / ours
    return found


def timeline(whole: Sequence[History], parts: Sequence[History]) -> Figure:
    """The history of figures, (date, microseconds) each: milliseconds of iterations of a whole rank, and of everything else how
    many times as fast it is as at first; the first `MOST_CURVES` of either."""
    figure, axes = _new(2, height=6.4)
    panels = (
        (axes[0], whole, "ms per iteration of one rank (down is better)", lambda us, _: us / 1e3),
        (axes[1], parts, "times as fast as at first (up is better)", lambda us, first: first / us),
    )
    for axis, series, title, value in panels:
        for colour, (name, points) in zip(_cycle(), series[:MOST_CURVES], strict=False):
            x = [datetime.fromisoformat(date).replace(tzinfo=None) for date, _ in points]
            y = [value(us, points[0][1]) for _, us in points]
            axis.plot(x, y, "o-", color=colour, markersize=4, label=f"{name}: {y[0]:.3g} to {y[-1]:.3g}")
        if series:
            dates = matplotlib.dates.ConciseDateFormatter(axis.xaxis.get_major_locator())  # pyright: ignore
            axis.xaxis.set_major_formatter(dates)
            axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(-0.05, -0.12))
        rest = max(0, len(series) - MOST_CURVES)
        axis.set(xlabel="UTC")
        axis.set_ylim(bottom=0)
        axis.set_title(title + (f"; {rest} more in the table" if rest else ""), loc="left", fontsize=10)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG (or whatever the suffix says) and closes the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def svg(figure: Figure) -> str:
    """The figure as an SVG element to be put into a page; closes it."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _cycle() -> Iterable[str]:
    while True:
        yield from COLOURS


def _grouped(lines: Sequence[Line], key: str) -> list[tuple[Any, list[Line]]]:
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.get(key), []).append(line)
    return sorted(groups.items(), key=lambda item: (item[0] is not None, item[0] if item[0] is not None else 0))


def _words(case: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else str(case)
