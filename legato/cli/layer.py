"""`legato bench layer`: what the terminal shows of one kind of decoder layer of a rank's share.

Owns the table and the lines of the record. Called by `legato.cli.share_commands`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from legato.bench.layer import LayerFigure, fields, measure
from legato.bench.record import Setting, append
from legato.bench.steady import SliceError, Work
from legato.cli.bench import device_named
from legato.cli.slice import Asked, Shown, case_of, check, routed_share_of
from legato.cli.tables import table
from legato.config import ConfigError
from legato.model.spec import IndexerKind


def kinds_of(text: str) -> list[IndexerKind]:
    """`shared,full`. Raises ConfigError."""
    found: list[IndexerKind] = []
    for word in text.split(","):
        if word not in ("full", "shared"):
            raise ConfigError(f"--kind must be shared, full or both with a comma, got {text!r}")
        found.append(word)
    return found


def bench_layer(asked: Asked, work: Work, kinds: list[IndexerKind], shown: Shown) -> list[dict[str, Any]]:
    """Builds the share once; measures, prints and records each kind of layer.

    Raises:
        ConfigError, SpecError, CheckpointError: for what cannot be measured.
    """
    check(asked, [work])
    console, device = Console(), device_named(asked.device)
    share = routed_share_of(asked, work, device)
    setting = Setting.here(device)
    lines: list[dict[str, Any]] = []
    for kind in kinds:
        try:
            figure = measure(share, work, kind, device)
        except SliceError as error:
            raise ConfigError(str(error)) from error
        line = fields(share, work, figure, setting.gpu, case_of(asked))
        _print(console, figure, line, setting)
        if shown.path is not None:
            append(shown.path, [line], setting)
        lines.append({**line, **asdict(setting)})
    return lines


def _print(console: Console, figure: LayerFigure, line: dict[str, Any], setting: Setting) -> None:
    spread = figure.spread
    kernels = "" if figure.kernels is None else f"{figure.kernels:g} kernels, "
    floor = "" if not line["floor_us"] else f" ({line['floor_us']:.1f} us, {line['roofline_percent']:.0f} %)"
    lines = [
        f"a {figure.kind} layer, {line['batch'] * (line['k'] + 1)} rows behind {line['context']:,} tokens: "
        f"{spread.median_us:.2f} us (p20 {spread.p20_us:.2f}, p80 {spread.p80_us:.2f}; {spread.method}), {kernels}"
        f"{figure.num_bytes / 1e6:.1f} MB must be read{floor}",
        f"{figure.experts_reached:.1f} experts reached; {figure.num_layers} layers in the chain, {figure.distinct} with weights "
        "of their own; exchanges between ranks are not in it",
        setting.machine,
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    if figure.moments:
        console.print("microseconds from the end of the layer before", style="dim")
        shown = table(("kernel",), ("begins", "ends"))
        for moment in figure.moments:
            shown.add_row(moment.name[:80], f"{moment.start_us:.2f}", f"{moment.stop_us:.2f}")
        console.print(shown)
