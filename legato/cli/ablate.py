"""`legato bench ablate`: one design decision after the other taken away, in a table beside what was published about it.

Owns what the terminal shows. Called by `legato.cli.share_commands`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from legato.bench import slice_trace
from legato.bench.ablate import CLAIMS, Ablation, measure
from legato.bench.ablate import Asked as Ablated
from legato.bench.record import Setting, append
from legato.bench.share import Share, routed
from legato.bench.split import PARTS, split
from legato.bench.steady import SliceError, Work, pack, steady
from legato.cli.bench import device_named
from legato.cli.slice import (
    Asked,
    Shown,
    case_of,
    check,
    conditions_of,
    is_drawn,
    print_trace,
    share_of,
    trace_case,
)
from legato.cli.tables import table
from legato.config import ConfigError
from legato.engine.start import targets_of
from legato.ops import bind


def bench_ablate(
    asked: Asked, work: Work, decisions: str, contexts: Sequence[int], shown: Shown
) -> list[dict[str, Any]]:
    """Measures, prints and records. Returns the lines of the ablations.

    Raises:
        ConfigError: for what cannot be measured; what was measured before is in the file.
    """
    check(asked, [replace(work, context=context) for context in (work.context, *contexts)])
    console, device = Console(), device_named(asked.device)
    if shown.trace is not None and device.type != "cuda":
        raise ConfigError("--trace records a GPU: use --device cuda")

    def draw(drafts: str) -> Share:
        share = share_of(replace(asked, drafts=drafts), [work], device)
        if device.type == "cuda":
            pack(share, work, device)
        return routed(share, work.distinct_experts, work.num_drafts + 1) if is_drawn(asked) else share

    if shown.trace is not None:
        bind(targets_of(str(device)), dict(work.ops))  # what is bound packs the weights as they are made
        _trace(console, asked, draw("stored"), work, shown)
    wanted = Ablated(work, _decisions(decisions), contexts, draw, targets_of(str(device)), device)
    found: list[Ablation] = []
    lines: list[dict[str, Any]] = []
    setting = Setting.here(device)
    case = {key: value for key, value in case_of(asked).items() if key != "drafts"}
    try:
        for share, one in measure(wanted):
            console.print(_words(one), style="dim", highlight=False)
            found.append(one)
            lines.append(one.line(share, work, case))
            if shown.path is not None:
                append(shown.path, lines[-1:], setting)
            del share  # the next one may be drawn anew, and two do not fit
    except SliceError as error:
        raise ConfigError(str(error)) from error
    console.print(_table(found), _published(found), sep="\n", soft_wrap=True, highlight=False)
    console.print(setting.machine, style="dim")
    return [{**line, **asdict(setting)} for line in lines]


def _decisions(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(CLAIMS)
    names = {name.lower(): name for name in CLAIMS}
    asked = [part.strip().lower() for part in text.split(",") if part.strip()]
    unknown = [part for part in asked if part not in names]
    if unknown or not asked:
        raise ConfigError(f"--decisions must be all or some of {', '.join(CLAIMS)}, got {text!r}")
    return tuple(names[part] for part in asked)


def _words(one: Ablation) -> str:
    step = "" if one.draft_step_us is None else f", a draft step {one.draft_step_us:.1f} us"
    return (
        f"{one.decision}: {one.variant}, {one.context:,} tokens: {one.spread.median_us / 1e3:.3f} ms, "
        f"{one.times:.3f} times the whole{step}"
    )


def _table(found: Sequence[Ablation]) -> Table:
    shown = table(("taken away", "in its place"), ("context", "ms", "times", "draft step, us"))
    for one in found:
        shown.add_row(
            one.decision,
            one.variant,
            f"{one.context:,}",
            f"{one.spread.median_us / 1e3:.3f}",
            f"{one.times:.3f}",
            "" if one.draft_step_us is None else f"{one.draft_step_us:.1f}",
        )
    return shown


def _published(found: Sequence[Ablation]) -> str:
    """What was published about the decisions in the table, a line each."""
    shown = dict.fromkeys(one.decision for one in found if one.decision in CLAIMS)
    return "\n".join(
        ["published (SGLang v0.5.15.post1, its authors):", *(f"  {name}: {CLAIMS[name]}" for name in shown)]
    )


def _trace(console: Console, asked: Asked, share: Share, work: Work, shown: Shown) -> None:
    """The pair: three graphs with the host between them, and the one graph."""
    assert shown.trace is not None
    device = share.weights.embed.device
    setting = Setting.here(device)
    standing = steady(share, work, device, extra_iterations=2 * shown.trace_iterations)
    attributed = slice_trace.attribute(standing, share)
    recorded: list[slice_trace.Recorded] = []
    pair = (
        ("three graphs, the host between them", split(standing, "host"), PARTS),
        ("one graph", contextlib.nullcontext(), 1),
    )
    for name, graphs, parts in pair:
        with graphs:
            recorded.append(slice_trace.record(name, standing, shown.trace_iterations, attributed, parts))
        print_trace(console, recorded[-1], shown.trace)
    title = f"{share.spec.name}, {share.spec.num_layers} layers: an iteration as three graphs and as one"
    slice_trace.write(shown.trace, title, conditions_of(setting), recorded)
    if shown.path is not None:
        lines = [
            {**trace_case(share, work, asked), "implementation": one.view.name, **one.fields()} for one in recorded
        ]
        append(shown.path, lines, setting)
