"""The subcommands of `legato bench` over one rank's share of a model: their flags and help.

Imports what a subcommand needs when it runs, as `legato.cli.bench_commands` does, which puts these among its own, and gives its
sweeps over lengths and users to a share where one is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from legato.cli import options
from legato.config import ConfigError

Model = Annotated[str | None, typer.Argument(help="Directory or hub id of a checkpoint.", show_default=False)]
Dims = Annotated[
    str | None, typer.Option(help="A published shape in place of a checkpoint: glm-5.2.", show_default=False)
]
Tp = Annotated[int, typer.Option(help="Ranks that share the model; one of them is measured.")]
Rank = Annotated[int, typer.Option(help="Which of them.")]
Layers = Annotated[
    int | None, typer.Option(help="Only the first so many decoder layers (and the MTP layer).", show_default=False)
]
Dummy = Annotated[
    bool, typer.Option("--dummy", help="Draw weights on the device; of a checkpoint, read config.json alone.")
]
Format = Annotated[str, typer.Option(help="Of drawn weights: nvfp4, fp8, int4, int4-fp8 or bf16.")]
Contexts = Annotated[
    str,
    typer.Option(help="Tokens that each request holds (written, not prefilled): one number or several, as 8K,80000."),
]
Experts = Annotated[
    str | None,
    typer.Option(
        help="Experts that one request's rows reach in a drawn layer, on average, as 44,33; by default routing is even.",
        show_default=False,
    ),
]
AcceptLength = Annotated[
    float | None,
    typer.Option(
        "--simulate-accept-length",
        show_default=False,
        help="Print tokens per second for so many tokens per iteration, as simulated. Of several numbers of drafts it is "
        "that of the largest; for fewer, drafts are taken to be accepted with equal chances.",
    ),
]
Iterations = Annotated[int, typer.Option(help="Iterations that are timed.")]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--tp",
        help="Of one rank's share in place of an engine (as bench slice): ranks that share the model, as 8 or 8,4.",
        show_default=False,
    ),
]
Json = Annotated[
    Path | None, typer.Option(help="Append each figure as a JSON object to this file.", show_default=False)
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Also record iterations kernel by kernel: a folder for trace.html and trace.json.gz (on a GPU).",
        show_default=False,
    ),
]
TraceIterations = Annotated[int, typer.Option(help="Iterations that are recorded.")]
Plot = Annotated[
    Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf (needs matplotlib).", show_default=False)
]

SWEPT_ITERATIONS = 20
"""Timed at each point of a sweep."""


def bench_slice(
    model: Model = None,
    dims: Dims = None,
    tp: Tp = 8,
    rank: Rank = 0,
    layers: Layers = None,
    dummy: Dummy = False,
    format: Format = "nvfp4",
    context: Contexts = "8K",
    k: Annotated[
        str,
        typer.Option("--num-drafts", "--k", "-k", help="Tokens drafted per iteration, 0 to 7: one number or several."),
    ] = "5",
    batch: Annotated[str, typer.Option(help="Requests: one number or several, as 1,4.")] = "1",
    distinct_experts: Experts = None,
    accept_length: AcceptLength = None,
    iterations: Iterations = 50,
    prefill: Annotated[
        str | None,
        typer.Option(
            help="Time prompts in place of iterations (--context, --batch), until their first token: new tokens, or "
            "new@cached, as 8K,2K@128K.",
            show_default=False,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="With --prefill: tokens of a prompt in one iteration; by default 8192, beside others what an engine takes.",
            show_default=False,
        ),
    ] = None,
    beside: Annotated[
        int,
        typer.Option(
            help="With --prefill: let an engine run one prompt while so many requests of --context tokens decode, and time "
            "their iterations."
        ),
    ] = 0,
    slowdown: options.Slowdown = None,
    draft_weights: options.DraftWeights = "stored",
    dense_format: options.DenseFormat = "stored",
    latent: options.Latent = "auto",
    device: options.Device = "auto",
    op: options.Ops = None,
    kernels: Annotated[int, typer.Option(help="Show so many kernels, the longest in all first (on a GPU).")] = 20,
    trace: Trace = None,
    trace_iterations: TraceIterations = 1000,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Times one rank's iteration on one device: the engine's own code on a share of the weights, without the other ranks.

    Exchanges between ranks are counted, modelled and printed apart. Without a checkpoint it is GLM-5.2 with drawn weights.
    """
    pictures = pictures_for(plot)
    from legato.bench.steady import Work
    from legato.cli.flags import numbers, overrides
    from legato.cli.prefill import bench_beside, bench_prefill, prompt_beside, prompts
    from legato.cli.slice import Asked, Shown, works
    from legato.cli.slice import bench_slice as run

    asked = Asked(model, dims, tp, rank, layers, dummy, format, draft_weights, dense_format, device, accept_length)
    one = Work(1, 1, 0, iterations, None, latent, overrides(op or []))
    experts = numbers("--distinct-experts", distinct_experts) if distinct_experts is not None else [None]
    if beside < 0:
        raise ConfigError(f"--beside must be at least 0, got {beside}")
    if beside and prefill is None:
        raise ConfigError("--beside needs a prompt: --prefill 80K")
    if prefill is not None:
        drafts = numbers("--num-drafts", k)
        if len(drafts) != 1 or len(experts) != 1:
            raise ConfigError("--prefill: give one number each as --num-drafts and --distinct-experts")
        if trace is not None or plot is not None:
            raise ConfigError("--prefill has no --trace and no --plot: leave them away")
        work = replace(one, num_drafts=drafts[0], distinct_experts=experts[0])
        if beside:
            (held,) = numbers("--context", context)
            work = replace(work, batch=beside, context=held)
            bench_beside(asked, prompt_beside(prefill, chunk, slowdown), work, json)
        else:
            bench_prefill(asked, prompts(prefill, chunk), work, Shown(kernels, json, None, 0))
        return
    listed = works(numbers("--context", context), numbers("--batch", batch), experts, numbers("--num-drafts", k), one)
    found = run(asked, [*listed], Shown(kernels, json, trace, trace_iterations))
    if pictures is not None and plot is not None:
        pictures.share(found, plot)


def bench_ablate(
    model: Model = None,
    dims: Dims = None,
    tp: Tp = 8,
    layers: Layers = None,
    dummy: Dummy = False,
    format: Format = "nvfp4",
    context: Annotated[str, typer.Option(help="Tokens that each request holds (written, not prefilled).")] = "8K",
    contexts: Annotated[
        str, typer.Option(help="The same, several, for what depends on it: draft steps that share a selection.")
    ] = "4K,80000,1000000",
    k: Annotated[int, typer.Option("--num-drafts", "--k", "-k", help="Tokens drafted per iteration, 0 to 7.")] = 5,
    batch: Annotated[int, typer.Option(help="Requests.")] = 1,
    distinct_experts: Experts = None,
    decisions: Annotated[
        str,
        typer.Option(
            help="Which, separated by commas; all: overlap, one graph, IndexShare, top-k, prologue, GEMM, "
            "draft weights."
        ),
    ] = "all",
    iterations: Iterations = 50,
    device: options.Device = "auto",
    trace: Trace = None,
    trace_iterations: TraceIterations = 100,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Times the iteration with one design decision after the other taken away, beside what was published about each.

    Nothing has a second loop: graphs are cut, and ops bound to other implementations. With --trace, three graphs with the host
    between them and the one graph are recorded as a pair.
    """
    pictures = pictures_for(plot)
    from legato.bench.steady import Work
    from legato.cli.ablate import bench_ablate as run
    from legato.cli.flags import numbers
    from legato.cli.slice import Asked, Shown

    asked = Asked(model, dims, tp, 0, layers, dummy, format, "stored", "stored", device, None)
    (one,), experts = numbers("--context", context), numbers("--distinct-experts", distinct_experts or "")
    work = Work(batch, one, k, iterations, experts[0] if experts else None, "auto", {})
    shown = Shown(0, json, trace, trace_iterations)
    found = run(asked, work, decisions, numbers("--contexts", contexts), shown)
    if pictures is not None and plot is not None:
        pictures.ablate(found, plot)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A share on which a sweep runs, by the flags of `bench isl` and `bench pareto`: a checkpoint's `model`, or a published shape
    `dims`, `layers` of it, with weights drawn in `format`."""

    model: str | None
    dims: str | None
    ranks: str
    layers: int | None
    format: str
    experts: str | None
    accept_length: float | None
    device: str
    latent: str
    ops: list[str]

    def run(self, contexts: str, batches: str, drafts: str, path: Path) -> list[dict[str, Any]]:
        """Every combination, for one number of ranks after the other; the lines, which are in the file by then.

        Raises:
            ConfigError, SpecError, CheckpointError: for what cannot be measured; what was measured before is in the file.
        """
        from legato.bench.steady import Work
        from legato.cli.flags import numbers, overrides
        from legato.cli.slice import Asked, Shown, by_ranks, works

        asked = Asked(
            self.model,
            self.dims,
            1,
            0,
            self.layers,
            False,
            self.format,
            "stored",
            "stored",
            self.device,
            self.accept_length,
        )
        experts = [None] if self.experts is None else numbers("--distinct-experts", self.experts)
        one = Work(1, 1, 0, SWEPT_ITERATIONS, None, self.latent, overrides(self.ops))
        listed = works(numbers("--context", contexts), numbers("--batch", batches), experts, numbers("-k", drafts), one)
        return by_ranks(asked, numbers("--tp", self.ranks), [*listed], Shown(0, path, None, 0))


def bench_layer(
    model: Model = None,
    dims: Dims = None,
    tp: Tp = 8,
    rank: Rank = 0,
    layers: Layers = None,
    dummy: Dummy = False,
    format: Format = "nvfp4",
    context: Annotated[str, typer.Option(help="Tokens that each request holds (written, not prefilled).")] = "8K",
    k: Annotated[int, typer.Option("--num-drafts", "--k", "-k", help="Drafts that rows verify, 0 to 7.")] = 5,
    batch: Annotated[int, typer.Option(help="Requests.")] = 1,
    distinct_experts: Experts = None,
    kind: Annotated[
        str, typer.Option(help="shared, full (with an indexer of its own), or both: shared,full.")
    ] = "shared",
    dense_format: options.DenseFormat = "stored",
    latent: options.Latent = "auto",
    device: options.Device = "auto",
    op: options.Ops = None,
    json: Json = None,
) -> None:
    """Times one kind of sparse decoder layer: hidden states to hidden states, many layers of it as one graph, and its kernels.

    Without a checkpoint it is GLM-5.2 with drawn weights.
    """
    from legato.bench.steady import Work
    from legato.cli.flags import numbers, overrides
    from legato.cli.layer import bench_layer as run
    from legato.cli.layer import kinds_of
    from legato.cli.slice import Asked, Shown

    asked = Asked(model, dims, tp, rank, layers, dummy, format, "stored", dense_format, device, None)
    (one,), experts = numbers("--context", context), numbers("--distinct-experts", distinct_experts or "")
    work = Work(batch, one, k, 1, experts[0] if experts else None, latent, overrides(op or []))
    run(asked, work, kinds_of(kind), Shown(0, json, None, 0))


def pictures_for(plot: Path | None) -> ModuleType | None:
    """What draws, if a picture is asked for: a missing matplotlib is noticed before anything is measured."""
    if plot is None:
        return None
    from legato.cli import pictures

    return pictures
