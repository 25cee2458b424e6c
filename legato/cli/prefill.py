"""`legato bench slice --prefill`: how long prompts take on one rank's share, their kernels, and what they cost those who decode.

Owns the reading of prompts and what the terminal shows. Called by `legato.cli.share_commands`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from legato.bench.beside import Beside, BesideFigure, measure_beside
from legato.bench.prefill import PrefillFigure, Prompt, measure_prefill, prefill_fields
from legato.bench.record import Setting, append
from legato.bench.share import Share
from legato.bench.steady import SliceError, Work
from legato.cli.bench import device_named
from legato.cli.flags import numbers
from legato.cli.slice import Asked, Shown, as_an_engine, case_of, kernel_table, routed_share_of, words
from legato.cli.tables import table
from legato.config import MAX_DRAFTS, ConfigError

REPEATS = 3
"""Timed runs of a prompt, after one that is not."""
CHUNK = 8192
"""Tokens of a prompt in one iteration where nobody decodes."""
SLOWDOWN = 2.0
"""How many times its own time an iteration may take; on a CPU too, where engines cut no prompts by default."""


def prompts(text: str, chunk: int | None) -> list[Prompt]:
    """`8K,2K@128K`: 8192 new tokens, and 2048 behind 131,072 cached ones, `chunk` at a time.

    Raises:
        ConfigError: the text is no list of such, or a number is below 1.
    """
    found: list[Prompt] = []
    for part in text.split(","):
        new, _, cached = part.partition("@")
        sizes = numbers("--prefill", new) + numbers("--prefill", cached)
        if len(sizes) not in (1, 2) or min(sizes) < 1:
            raise ConfigError(
                f"--prefill must be prompts such as 8K or 2K@128K (new tokens, cached ones), got {text!r}"
            )
        found.append(Prompt(sizes[0], sizes[1] if len(sizes) == 2 else 0, CHUNK if chunk is None else chunk, REPEATS))
    if chunk is not None and chunk < 1:
        raise ConfigError(f"--chunk must be at least 1, got {chunk}")
    return found


def prompt_beside(text: str, chunk: int | None, slowdown: float | None) -> Beside:
    """`80K`, or `64@8K` behind cached tokens: one prompt. Raises ConfigError for anything else."""
    found = prompts(text, chunk)
    if len(found) != 1:
        raise ConfigError(f"--beside: give one prompt as --prefill, got {text!r}")
    return Beside(found[0].new, chunk, SLOWDOWN if slowdown is None else slowdown, found[0].cached)


def bench_prefill(asked: Asked, listed: Sequence[Prompt], work: Work, shown: Shown) -> list[dict[str, Any]]:
    """Builds the share once; measures, prints and records each prompt. Of `work` drafts, experts, latent and ops count.

    Raises:
        ConfigError, SpecError, CheckpointError: for what cannot be measured; what was measured before is in the file.
    """
    if not 0 <= work.num_drafts <= MAX_DRAFTS:
        raise ConfigError(f"--k must be between 0 and {MAX_DRAFTS}, got {work.num_drafts}")
    console, device = Console(), device_named(asked.device)
    asked = as_an_engine(asked, device)
    share = routed_share_of(asked, work, device)
    setting = Setting.here(device)
    lines: list[dict[str, Any]] = []
    for prompt in listed:
        figure = measure_prefill(share, prompt, work, device)
        line = prefill_fields(share, prompt, figure, case_of(asked))
        _print(console, share, prompt, figure, line, setting)
        if shown.kernels and figure.kernels:
            console.print(kernel_table(figure.kernels, shown.kernels))
        if shown.path is not None:
            append(shown.path, [line], setting)
        lines.append({**line, **asdict(setting)})
    return lines


def bench_beside(asked: Asked, beside: Beside, work: Work, path: Path | None) -> dict[str, Any]:
    """Measures, prints and records a prompt beside requests that decode.

    Raises:
        ConfigError, SpecError, CheckpointError: for what cannot be measured.
    """
    console, device = Console(), device_named(asked.device)
    asked = as_an_engine(asked, device)
    share = routed_share_of(asked, work, device)
    try:
        figure = measure_beside(share, beside, work, device)
    except SliceError as error:
        raise ConfigError(str(error)) from error
    setting = Setting.here(device)
    line = figure.fields(share, beside, work, case_of(asked))
    _print_beside(console, share, work, figure, line, setting)
    if path is not None:
        append(path, [line], setting)
    return {**line, **asdict(setting)}


def _print_beside(
    console: Console, share: Share, work: Work, figure: BesideFigure, line: dict[str, Any], setting: Setting
) -> None:
    spec, mesh = share.spec, share.communicator.mesh
    behind = f"behind {line['cached_tokens']:,} cached ones " if line["cached_tokens"] else ""
    seconds = f"{figure.first_token:.2f} s"
    if len(figure.first_tokens) > 1:
        each = ", ".join(f"{1e3 * one:.0f}" for one in figure.first_tokens)
        seconds = f"{1e3 * figure.first_token:.0f} ms (one prompt after the other: {each})"
    times = ", ".join(f"{name} {line[f'times_{name}']:.2f}" for name in ("median", "p90", "p99", "most"))
    lines = [
        f"{spec.name}, {spec.num_layers} layers, rank {mesh.rank} of {mesh.size}: {line['new_tokens']:,} tokens "
        f"{behind}in chunks of {line['chunk_tokens']:,} beside {words(work)}; exchanges between ranks are not in it",
        f"iteration alone {1e3 * figure.alone:.3f} ms; beside the prompt, times that: {times} ({line['iterations']} iterations, "
        f"{line['iterations_over']} over {line['slowdown']:g})",
        f"the prompt's first token after {seconds}",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    shown = table(("layers", "tokens before"), ("times alone", "ms", "ms expected", "ms of host time"))
    for turn in figure.worst:
        told = turn.fields
        layers = "all" if told["layers"] is None else "{} to {}".format(*told["layers"])
        expected = "-" if turn.expected is None else f"{1e3 * turn.expected:.2f}"
        shown.add_row(
            layers, f"{told['tokens_before']:,}", f"{turn.seconds / figure.alone:.2f}", f"{1e3 * turn.seconds:.2f}", expected,
            f"{1e3 * turn.host:.2f}",
        )  # fmt: skip
    console.print(shown)
    console.print(setting.machine, highlight=False, soft_wrap=True)


def _print(
    console: Console, share: Share, prompt: Prompt, figure: PrefillFigure, line: dict[str, Any], setting: Setting
) -> None:
    spec, mesh, spread = share.spec, share.communicator.mesh, figure.spread
    lines = [
        f"{spec.name}, {spec.num_layers} layers, rank {mesh.rank} of {mesh.size}: {prompt.new:,} new tokens behind "
        f"{prompt.cached:,} cached ones (written, not computed), {prompt.chunk:,} at a time",
        f"first token after {spread.median_us / 1e3:.1f} ms (p20 {spread.p20_us / 1e3:.1f}, p80 {spread.p80_us / 1e3:.1f}; "
        f"{prompt.repeats} runs), {line['tokens_per_s']:,.0f} tokens/s, {figure.host_us / 1e3:.1f} ms of host time to launch; "
        "exchanges between ranks are not in it",
    ]
    if figure.padded_to is not None:
        lines.append(f"the last chunk ran in the graphs of {figure.padded_to} rows")
    if figure.peak_bytes:
        lines.append(f"{figure.peak_bytes / 1e9:.2f} GB of device memory beyond weights and caches, at most")
    lines.append(setting.machine)
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
