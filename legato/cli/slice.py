"""`legato bench slice`: one rank's share of an iteration on this device, its kernels, and what a group would make of it.

Owns the combination of flags and what the terminal shows. Called by `legato.cli.share_commands` and `ablate`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from legato.bench import slice_trace
from legato.bench.kernels import KernelTime
from legato.bench.launches import GLM_5_2
from legato.bench.record import Setting, append
from legato.bench.share import Share, drawn, drawn_bytes, first_layers, loaded, routed
from legato.bench.slice import Figure, accept_length_at, fields, measure, simulated
from legato.bench.steady import SliceError, Work, pack, steady
from legato.cli.bench import device_named
from legato.cli.tables import table
from legato.config import MAX_DRAFTS, ConfigError
from legato.engine.room import check_weights, host_bytes
from legato.engine.start import open_checkpoint, resident_as, targets_of
from legato.model.convert import Target
from legato.model.inventory import stored_spec
from legato.model.lean import DraftWeights, settled
from legato.model.requantization import DenseFormat, Requantization
from legato.model.spec import ModelSpec
from legato.ops import BindError, Bindings, bind
from legato.parallel import Mesh

FORMATS: Mapping[str, Target | None] = {
    "nvfp4": Target.NVFP4, "fp8": Target.FP8, "int4": Target.INT4, "int4-fp8": Target.INT4_FP8, "bf16": None,
}  # fmt: skip

DIMENSIONS: Mapping[str, dict[str, object]] = {"glm-5.2": GLM_5_2}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags say. `model` and `dims` name the model, one of them; `dummy` draws weights in `format`."""

    model: str | None
    dims: str | None
    tp: int
    rank: int
    layers: int | None
    dummy: bool
    format: str
    drafts: str
    dense: str
    device: str
    accept_length: float | None


@dataclass(frozen=True, slots=True)
class Shown:
    """What becomes of the figures: so many kernels in a table, lines appended to a file, a recording in a folder."""

    kernels: int
    path: Path | None
    trace: Path | None
    trace_iterations: int


def works(
    contexts: Sequence[int],
    batches: Sequence[int],
    experts: Sequence[float | None],
    drafts: Sequence[int],
    one: Work,
) -> Iterator[Work]:
    """Every combination, in everything else like `one`."""
    for num_drafts, distinct, batch, context in product(drafts, experts, batches, contexts):
        yield replace(one, context=context, batch=batch, distinct_experts=distinct, num_drafts=num_drafts)


def bench_slice(asked: Asked, listed: Sequence[Work], shown: Shown) -> list[dict[str, Any]]:
    """Builds the share once; measures, prints and records each piece of work. Returns the lines.

    Raises:
        ConfigError, SpecError, CheckpointError: for what cannot be measured; what was measured before is in the file.
    """
    if not listed:
        raise ConfigError("--context, --batch, --num-drafts and --distinct-experts need a number each")
    check(asked, listed)
    console, device = Console(), device_named(asked.device)
    if shown.trace is not None and device.type != "cuda":
        raise ConfigError("--trace records a GPU: use --device cuda")
    asked = as_an_engine(asked, device)
    bound = bind_ops(listed[0], device)
    share = share_of(asked, listed, device)
    if device.type == "cuda":
        pack(share, listed[0], device)
    most = max(work.num_drafts for work in listed)
    lines: list[dict[str, Any]] = []
    recorded: list[slice_trace.Recorded] = []
    routing: tuple[float | None, int] | None = None
    for work in listed:
        if is_drawn(asked) and routing != (work.distinct_experts, work.num_drafts):
            routing = work.distinct_experts, work.num_drafts
            share = routed(share, work.distinct_experts, work.num_drafts + 1)
        lines.append(_measure(console, asked, share, work, bound, shown, most))
        if shown.trace is not None:
            recorded.append(_trace(console, asked, share, work, shown, "" if len(listed) == 1 else words(work)))
            # Each time anew: what was recorded stays if a later one fails.
            title = f"{share.spec.name}{f' in {asked.format.upper()}' if is_drawn(asked) else ''}, "
            title += f"{share.spec.num_layers} layers, rank of {share.communicator.mesh.size}"
            title += f": {words(work)}" if len(listed) == 1 else ""
            slice_trace.write(shown.trace, title, conditions_of(Setting.here(device)), recorded)
    return lines


def by_ranks(asked: Asked, ranks: Sequence[int], listed: Sequence[Work], shown: Shown) -> list[dict[str, Any]]:
    """The same for one number of ranks after the other, of which one share is held at a time."""
    if not ranks:
        raise ConfigError("--tp needs a number")
    lines: list[dict[str, Any]] = []
    for size in ranks:
        lines += bench_slice(replace(asked, tp=size), listed, shown)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return lines


def check(asked: Asked, listed: Sequence[Work]) -> None:
    """Refuses numbers that cannot be. Raises ConfigError."""
    drafts = [work.num_drafts for work in listed]
    if not 0 <= min(drafts) <= max(drafts) <= MAX_DRAFTS:
        raise ConfigError(f"--k must be between 0 and {MAX_DRAFTS}, got {', '.join(map(str, sorted(set(drafts))))}")
    if min(min(work.batch, work.context, work.iterations) for work in listed) < 1:
        raise ConfigError("--batch, --context and --iterations must be at least 1")
    if asked.accept_length is not None and not 1 <= asked.accept_length <= max(drafts) + 1:
        raise ConfigError(
            f"--simulate-accept-length must be between 1 and k + 1 = {max(drafts) + 1}, got {asked.accept_length:g}"
        )


def _measure(
    console: Console, asked: Asked, share: Share, work: Work, bound: Bindings, shown: Shown, most_drafts: int
) -> dict[str, Any]:
    device = share.weights.embed.device
    try:
        figure = measure(share, work, device, bound)
    except SliceError as error:
        raise ConfigError(str(error)) from error
    setting = Setting.here(device)
    line = fields(share, work, figure, setting.gpu, case_of(asked))
    if asked.accept_length is not None:
        line |= simulated(figure, accept_length_at(asked.accept_length, most_drafts, work.num_drafts))
    _print(console, asked, share, work, figure, line, setting)
    if shown.kernels and figure.kernels:
        console.print(kernel_table(figure.kernels, shown.kernels))
    if shown.path is not None:
        append(shown.path, [line], setting)
    return {**line, **asdict(setting)}


def _trace(console: Console, asked: Asked, share: Share, work: Work, shown: Shown, name: str) -> slice_trace.Recorded:
    """Records the steady state, prints the figures and the ops, and appends the line of the record."""
    assert shown.trace is not None
    device = share.weights.embed.device
    standing = steady(share, work, device, extra_iterations=shown.trace_iterations)
    found = slice_trace.record(name, standing, shown.trace_iterations, slice_trace.attribute(standing, share))
    print_trace(console, found, shown.trace)
    if shown.path is not None:
        line = {**trace_case(share, work, asked), "implementation": "one graph", **found.fields()}
        append(shown.path, [line], Setting.here(device))
    return found


def words(work: Work) -> str:
    """What is recorded, in words."""
    experts = "" if work.distinct_experts is None else f", {work.distinct_experts:g} experts"
    requests = "1 request" if work.batch == 1 else f"{work.batch} requests"
    return f"{requests} of {work.context:,} tokens, K = {work.num_drafts}{experts}"


def trace_case(share: Share, work: Work, asked: Asked) -> dict[str, Any]:
    """What a line of a recording says besides its figures."""
    mesh = share.communicator.mesh
    return {
        "bench": "trace",
        "name": share.spec.name,
        "case": {"tp": mesh.size, "layers": share.spec.num_layers, **case_of(asked)},
        **work.fields,
        "context_synthetic": True,
        "correct": None,
    }


def conditions_of(setting: Setting) -> str:
    """Where and when, in a line."""
    return f"{setting.gpu}, driver {setting.driver}, {setting.clocks}, commit {setting.commit}, {setting.date}"


def print_trace(console: Console, found: slice_trace.Recorded, folder: Path) -> None:
    """The figures of a recording, and its ops."""
    figures = found.view.figures
    waited = ", ".join(f"{count} x {name}" for name, count in {**found.waits, **found.allocations}.items())
    console.print(
        f"{found.view.name or 'recorded'}: {figures.num_iterations} iterations of {figures.iteration_us:,.1f} us, busy "
        f"{figures.busy_percent:.2f} %, gap {figures.gap_us:.1f} us (worst {figures.worst_gap_us:.1f}), "
        f"{figures.kernels:,.0f} kernels; the host waited or allocated: {waited or 'never'}",
        highlight=False,
        soft_wrap=True,
    )
    shown = table(("op",), ("launches", "us", "us its bytes need", "us above"))
    for op in found.view.ops:
        needs = "-" if op.floor_us is None else f"{op.floor_us:.1f}"
        shown.add_row(op.op, str(op.launches), f"{op.us:.1f}", needs, f"{op.above_us:.1f}")
    console.print(shown)
    console.print(f"{folder / 'trace.html'}, {folder / 'trace.json.gz'} (ui.perfetto.dev)", highlight=False)


def case_of(asked: Asked) -> dict[str, str]:
    """What tells figures apart besides numbers."""
    drawn_as = {"format": asked.format, "weights": "dummy"} if is_drawn(asked) else {"weights": "checkpoint"}
    return {**drawn_as, "drafts": asked.drafts, "dense": asked.dense}


def as_an_engine(asked: Asked, device: torch.device) -> Asked:
    """With the draft weights that an engine on this device takes, where the flags say "auto": figures name what was measured."""
    resident = resident_as(targets_of(str(device)), dtype_on(device))
    return replace(asked, drafts=settled(asked.drafts, resident))


def dtype_on(device: torch.device) -> torch.dtype:
    """The type of activations and norms."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def is_drawn(asked: Asked) -> bool:
    """Whether weights are drawn rather than read."""
    return asked.dummy or asked.model is None


def bind_ops(work: Work, device: torch.device) -> Bindings:
    """Which implementation each op has; to be called first of all, since what is bound packs the weights as they are made. Raises
    ConfigError."""
    try:
        return bind(targets_of(str(device)), dict(work.ops))
    except BindError as error:
        raise ConfigError(f"--op: {error}") from error


def routed_share_of(asked: Asked, work: Work, device: torch.device) -> Share:
    """The share that the flags name, with ops bound, and with a router for as many experts as `work` names where it is drawn.
    Raises as `share_of`."""
    bind_ops(work, device)
    share = share_of(asked, [work], device)
    return routed(share, work.distinct_experts, work.num_drafts + 1) if is_drawn(asked) else share


def share_of(asked: Asked, listed: Sequence[Work], device: torch.device) -> Share:
    """The share that the flags name.

    Raises:
        ConfigError, SpecError, CheckpointError: they contradict one another, or name nothing that can be had.
    """
    if asked.model is not None and asked.dims is not None:
        raise ConfigError("give a model or --dims, not both")
    if asked.dims is not None and asked.dims not in DIMENSIONS:
        raise ConfigError(f"--dims must be one of {', '.join(DIMENSIONS)}, got {asked.dims!r}")
    if asked.format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {asked.format!r}")
    again = Requantization(DraftWeights.parse(asked.drafts), DenseFormat(asked.dense))
    try:
        mesh = Mesh(asked.rank, asked.tp)
    except ValueError as error:
        raise ConfigError(f"--rank and --tp: {error}") from error
    dtype = dtype_on(device)
    if not is_drawn(asked):
        if asked.layers is not None or any(work.distinct_experts is not None for work in listed):
            raise ConfigError(
                "--layers and --distinct-experts need --dummy: a checkpoint has its layers and its router"
            )
        checkpoint = open_checkpoint(asked.model)
        return loaded(checkpoint, stored_spec(checkpoint), mesh, device, dtype, again)
    spec = (
        ModelSpec.from_config(DIMENSIONS[asked.dims or "glm-5.2"], name="GLM-5.2")
        if asked.model is None
        else stored_spec(open_checkpoint(asked.model))
    )
    spec = first_layers(spec, asked.layers or spec.num_layers)
    has = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes()
    remedy = "give more ranks (--tp), fewer layers (--layers) or another --format or --device"
    check_weights(drawn_bytes(spec, mesh, FORMATS[asked.format]), has, f"the device ({device})", remedy)
    return drawn(spec, mesh, FORMATS[asked.format], device, dtype, again)


def _print(
    console: Console,
    asked: Asked,
    share: Share,
    work: Work,
    figure: Figure,
    line: Mapping[str, object],
    setting: Setting,
) -> None:
    spec, mesh, spread = share.spec, share.communicator.mesh, figure.spread
    lines = [
        f"{spec.name}, {spec.num_layers} layers, rank {mesh.rank} of {mesh.size}; {words(work)} "
        f"(contexts written, not prefilled), {asked.drafts} draft weights, dense weights "
        f"{'as stored' if asked.dense == 'stored' else 'in FP8'}",
        f"iteration {spread.median_us / 1e3:.3f} ms (p20 {spread.p20_us / 1e3:.3f}, p80 {spread.p80_us / 1e3:.3f}; "
        f"{figure.how}, {work.iterations} iterations), {figure.host_us:.0f} us of host time to launch one",
        f"{line['bytes'] / 1e9:.3f} GB must be read"  # type: ignore[operator]
        + (f": {line['floor_us'] / 1e3:.3f} ms, {line['roofline_percent']:.0f} %" if line["floor_us"] else "")  # type: ignore[operator]
        + f"; {figure.experts_reached:.1f} experts reached per sparse layer",
        f"without the other ranks: {figure.exchanges} exchanges are not in it; they would add "
        f"{figure.added.total / 1e3:.2f} ms ({figure.added.measured / 1e3:.2f} measured on one and two GPUs, "
        f"{figure.added.reckoned / 1e3:.2f} reckoned for words of more rows)",
    ]
    if figure.num_latents < spec.num_layers + int(spec.has_mtp):
        lines.append(f"memory holds {figure.num_latents} latent caches: layers use them in turn")
    if figure.kernels:
        total = sum(kernel.total_us for kernel in figure.kernels)
        lines.append(
            f"{sum(kernel.calls for kernel in figure.kernels)} kernels, {total / 1e3:.3f} ms in all (profiled)"
        )
    if "accept_length" in line:
        lines.append(
            f"SIMULATED accept length {line['accept_length']:.2f}: {line['tokens_per_s_simulated']:.1f} tokens/s, "
            f"{line['tokens_per_s_simulated_with_exchanges']:.1f} with exchanges"
        )
    lines.append(setting.machine)
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def kernel_table(kernels: Sequence[KernelTime], num_shown: int) -> Table:
    """The kernels that took longest."""
    shown = table(("kernel",), ("calls", "us of the iteration", "us each", "busy us"))
    for kernel in kernels[:num_shown]:
        each = kernel.advance_us / kernel.calls
        shown.add_row(
            kernel.name[:90], str(kernel.calls), f"{kernel.advance_us:.1f}", f"{each:.2f}", f"{kernel.total_us:.1f}"
        )
    return shown
