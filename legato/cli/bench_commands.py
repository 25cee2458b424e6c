"""The subcommands of `legato bench`: their flags and help.

Imports what a subcommand needs when it runs, so that `legato --help` needs no torch. Called by `legato.__main__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from legato.cli import options, share_commands
from legato.cli.flags import EngineFlags
from legato.config import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measures Legato, or any server.")

# What is asked of a server, for all loads.
PromptTokens = Annotated[
    int | None, typer.Option(help="About so long a prompt (4 characters a token).", show_default=False)
]
ReplyTokens = Annotated[int, typer.Option(help="Most tokens of a reply.")]
ServersTemperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="By default the server's own.", show_default=False)
]
SentKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.", show_default=False)
]


@app.command("ops")
def bench_ops(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders of ops, e.g. gemm; by default all.", show_default=False),
    ] = None,
    implementation: Annotated[
        str,
        typer.Option(
            "--implementation", "-i", help="Names, such as sm90,cublas; best: what an engine would bind; all."
        ),
    ] = "best",
    case: Annotated[str, typer.Option(help="Only cases (or ops) whose name matches this shell pattern.")] = "*",
    device: options.Device = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(help="Folder reduce only: sums over so many GPUs, in a process each.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append one JSON object per case to this file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw how many times as fast as the others the first implementation is, by rows.", show_default=False
        ),
    ] = None,
) -> None:
    """Times ops case by case, after checking each result, and compares with what memory and arithmetic allow.

    Exit code 1 if a result is wrong: wrong results have no time.
    """
    from legato.cli import bench

    if ranks is not None:
        correct = bench.bench_ranks(folders or [], ranks, json)
    else:
        pictures = share_commands.pictures_for(plot)
        lines = bench.bench_ops(folders or [], implementation, case, device, json)
        if plot is not None and pictures is not None:
            pictures.speed_up(lines, plot)
        correct = all(line["correct"] for line in lines)
    if not correct:
        raise typer.Exit(1)


@app.command("skeleton")
def bench_skeleton(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Directory or hub id of a checkpoint; by default GLM-5.2.", show_default=False
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("--gpus", help="Ranks that share the model; one of them is measured.")] = 8,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-k", help="Tokens drafted per iteration, 0 to 7.")] = 5,
    device: options.Device = "auto",
    json: Annotated[
        Path | None, typer.Option(help="Append the figure as a JSON object to this file.", show_default=False)
    ] = None,
) -> None:
    """Times an iteration's launches with their weights' bytes and nothing else: what launches and memory must cost.

    On a machine without a GPU it lists the launches and their bytes.
    """
    from legato.cli.skeleton import bench_skeleton as run

    run(model, ranks, num_drafts, device, json)


app.command("slice")(share_commands.bench_slice)
app.command("ablate")(share_commands.bench_ablate)
app.command("layer")(share_commands.bench_layer)


@app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server, e.g. http://127.0.0.1:8000.")],
    prompts: Annotated[
        str, typer.Option(help="held-out (code), synthetic, agents, random, or a file: lines, or JSON lines.")
    ] = "held-out",
    sessions: Annotated[int, typer.Option("--sessions", "-n", help="How many conversations are begun.")] = 32,
    concurrency: Annotated[int, typer.Option(help="Closed loop: so many users, each waiting for the reply.")] = 1,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: sessions per second, whether or not the server keeps up.", show_default=False),
    ] = None,
    spacing: Annotated[Literal["poisson", "fixed"], typer.Option(help="Of an open loop's arrivals.")] = "poisson",
    input_tokens: PromptTokens = None,
    max_tokens: ReplyTokens = 128,
    temperature: ServersTemperature = None,
    entropy: Annotated[float, typer.Option(help="Bits per word of synthetic prompts.")] = 8.0,
    turns: Annotated[int, typer.Option(help="Turns of each agent session.")] = 10,
    think: Annotated[float, typer.Option(help="Seconds between a reply and the next turn.")] = 0.0,
    goodput: Annotated[
        str | None, typer.Option(help="What counts as good, e.g. ttft=500ms,tpot=20ms.", show_default=False)
    ] = None,
    warmup: Annotated[int, typer.Option(help="Sessions run before, one at a time, not counted.")] = 1,
    api: Annotated[Literal["chat", "completions"], typer.Option(help="Which endpoint.")] = "chat",
    model: Annotated[
        str, typer.Option(help="Name in the requests; by default the first that is served.", show_default=False)
    ] = "",
    api_key: SentKey = None,
    extra: Annotated[
        str, typer.Option(help='Further fields of each request, as a JSON object, e.g. {"ignore_eos": true}.')
    ] = "{}",
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    random_with_speculation: Annotated[
        bool, typer.Option("--random-with-speculation", help="Measure random words although the server drafts.")
    ] = False,
    json: Annotated[Path, typer.Option(help="JSON lines are appended here.")] = Path("bench-serve.jsonl"),
) -> None:
    """Measures a running server: latencies as users feel them, throughput, accept length.

    Exit code 1 if a request failed.
    """
    from legato.bench.load.arrivals import ClosedLoop, OpenLoop
    from legato.bench.load.endpoint import Endpoint, extra_fields
    from legato.bench.load.prompts import Source
    from legato.bench.load.run import Load
    from legato.bench.load.statistics import Limits
    from legato.cli.load import bench_serve as run

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    endpoint = Endpoint(url, model, api, headers, max_tokens, temperature, extra=extra_fields(extra))
    load = Load(
        Source(prompts, input_tokens, entropy, turns, seed),
        sessions,
        ClosedLoop(concurrency) if rate is None else OpenLoop(rate, spacing),
        warmup,
        think,
        None if goodput is None else Limits.parse(goodput),
        timeout,
        random_with_speculation,
        seed,
    )
    if not run(endpoint, load, json):
        raise typer.Exit(1)


@app.command("trace")
def bench_trace(
    model: options.Model = None,
    batch: Annotated[int, typer.Option(help="Requests that decode.")] = 1,
    context: Annotated[int, typer.Option("--tokens", help="Tokens of each request's prompt, drawn at random.")] = 1024,
    iterations: Annotated[int, typer.Option(help="Iterations that are recorded.")] = 100,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    num_drafts: options.NumDrafts = None,
    dtype: options.Dtype = "auto",
    latent: options.Latent = "auto",
    op: options.Ops = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of trace.html and trace.json.gz.")] = Path("trace"),
    kernels: Annotated[int, typer.Option(help="Show so many kernels, those that take longest first.")] = 20,
    json: Annotated[
        Path | None, typer.Option(help="Append the figures as a JSON object to this file.", show_default=False)
    ] = None,
) -> None:
    """Records the decode iterations of a GPU kernel by kernel: how busy it is, what lies between, what takes the time.

    Random prompts say nothing about accept lengths.
    """
    from legato.bench.trace_run import Wanted
    from legato.cli.trace import bench_trace as run

    flags = EngineFlags(
        model=model, num_drafts=num_drafts, dtype=dtype, latent=latent, op=op, max_running=batch, chunk_tokens=512
    )
    run(flags.engine(), Wanted(batch, context, iterations, temperature), folder, json, kernels)


Plot = Annotated[
    Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf (needs matplotlib).", show_default=False)
]
Paths = Annotated[list[Path], typer.Argument(help="Files of JSON lines, or folders of them.")]


@app.command("pareto")
def bench_pareto(
    url: Annotated[
        str,
        typer.Option(help="A running server; by default one is started for each number of drafts.", show_default=False),
    ] = "",
    drafts: Annotated[str, typer.Option(help="Numbers of drafts (K) to sweep, for servers started here.")] = "0,3,5",
    concurrency: Annotated[str, typer.Option(help="Users at a time to sweep.")] = "1,2,4,8",
    sessions_per_user: Annotated[int, typer.Option(help="Requests of each user.")] = 4,
    prompts: Annotated[str, typer.Option(help="As for bench serve.")] = "held-out",
    input_tokens: PromptTokens = None,
    max_tokens: ReplyTokens = 128,
    temperature: ServersTemperature = None,
    api_key: SentKey = None,
    model: options.Model = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    dims: share_commands.Dims = None,
    tp: share_commands.Ranks = None,
    layers: share_commands.Layers = None,
    format: share_commands.Format = "nvfp4",
    context: Annotated[str, typer.Option(help="With --tp: tokens that each request holds.")] = "8K",
    distinct_experts: share_commands.Experts = None,
    accept_length: share_commands.AcceptLength = None,
    json: Annotated[Path, typer.Option(help="JSON lines are appended here.")] = Path("bench-pareto.jsonl"),
    plot: Plot = None,
) -> None:
    """Tokens/s of one user against tokens/s of all, over drafts and users, beside what memory would allow.

    With --tp it is one rank's share without a server: tokens/s are simulated. Exit code 1 if a request failed.
    """
    pictures = share_commands.pictures_for(plot)
    if _is_of_share(tp, dims, model, (layers, distinct_experts, accept_length)):
        if url or threads is not None:
            raise ConfigError("--url and --threads do not go with --tp: a share has no server")
        share = share_commands.Sweep(
            model, dims, tp or "8", layers, format, distinct_experts, accept_length, device, "auto", []
        )
        found = share.run(context, concurrency, drafts, json)
        if pictures is not None and plot is not None:
            pictures.share(found, plot)
        return
    from legato.bench.load.arrivals import ClosedLoop
    from legato.bench.load.endpoint import Endpoint
    from legato.bench.load.prompts import Source
    from legato.bench.load.run import Load
    from legato.bench.pareto import Sweep
    from legato.cli.figures import bench_pareto as run
    from legato.cli.flags import numbers
    from legato.config import Config, ExecutionConfig

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    endpoint = Endpoint(url, model or "" if url else "", "chat", headers, max_tokens, temperature)
    swept = () if url else numbers("--drafts", drafts)
    sweep = Sweep(swept, numbers("--concurrency", concurrency), sessions_per_user)
    arguments = ["--device", device]
    arguments += [] if model is None else ["--model", model]
    arguments += [] if threads is None else ["--threads", str(threads)]
    config = Config(model=model, execution=ExecutionConfig(device=device, threads=threads))
    load = Load(Source(prompts, input_tokens), 1, ClosedLoop(1))
    found = run(endpoint, load, sweep, config, arguments, json)
    if pictures is not None and plot is not None:
        pictures.pareto(found, plot)
    if any(line["summary"]["failed"] for line in found):
        raise typer.Exit(1)


@app.command("isl")
def bench_isl(
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompt; 1K is 1024.", show_default="128,512,1K,2K,4K; with --tp 1K,2K,4K,...,1M"
        ),
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated at each length.")] = 64,
    model: options.Model = None,
    num_drafts: options.NumDrafts = None,
    device: options.Device = "auto",
    context: options.Context = None,
    latent: options.Latent = "auto",
    index: options.Index = "auto",
    threads: options.Threads = None,
    op: options.Ops = None,
    dims: share_commands.Dims = None,
    tp: share_commands.Ranks = None,
    layers: share_commands.Layers = None,
    format: share_commands.Format = "nvfp4",
    distinct_experts: share_commands.Experts = None,
    accept_length: share_commands.AcceptLength = None,
    json: Annotated[Path, typer.Option(help="JSON lines are appended here.")] = Path("bench-isl.jsonl"),
    plot: Plot = None,
) -> None:
    """Iteration time, accept length and tokens/s over the length of the prompt, for one user.

    With --tp it is one rank's share, whose contexts are written and not prefilled: tokens/s are simulated.
    """
    pictures = share_commands.pictures_for(plot)
    if _is_of_share(tp, dims, model, (layers, distinct_experts, accept_length)):
        if context is not None or threads is not None or index != "auto":
            raise ConfigError("--context, --threads and --index do not go with --tp: give --lengths")
        share = share_commands.Sweep(
            model, dims, tp or "8", layers, format, distinct_experts, accept_length, device, latent, op or []
        )
        found = share.run(lengths or SHARE_LENGTHS, "1", str(5 if num_drafts is None else num_drafts), json)
        if pictures is not None and plot is not None:
            pictures.share(found, plot)
        return
    from legato.cli.figures import bench_isl as run
    from legato.cli.flags import numbers

    engine = EngineFlags(
        model=model,
        device=device,
        num_drafts=num_drafts,
        context=context,
        latent=latent,
        index=index,
        threads=threads,
        op=op,
    )
    config = engine.engine()
    found = run(config, numbers("--lengths", lengths or "128,512,1K,2K,4K"), output_tokens, json)
    if pictures is not None and plot is not None:
        pictures.isl(found, plot)


SHARE_LENGTHS = "1K,2K,4K,8K,16K,32K,64K,128K,256K,512K,1M"
"""At which a share is measured."""


def _is_of_share(tp: str | None, dims: str | None, model: str | None, of_share: Sequence[object]) -> bool:
    """Whether a sweep runs on one rank's share. Raises ConfigError for flags `of_share` alone where no share is named."""
    if tp is not None and dims is None and model is None:
        raise ConfigError("--tp: name a published shape with --dims, or a checkpoint with --model")
    if tp is None and dims is None and any(flag is not None for flag in of_share):
        raise ConfigError(
            "--layers, --distinct-experts and --simulate-accept-length are of one rank's share: give --tp, and --dims"
        )
    return tp is not None or dims is not None


@app.command("timeline")
def bench_timeline(paths: Paths, plot: Plot = None) -> None:
    """What became faster: figures that were recorded more than once, from the first record to the last."""
    pictures = share_commands.pictures_for(plot)
    from legato.cli.figures import bench_timeline as run

    found = run(paths)
    if pictures is not None and plot is not None:
        pictures.timeline(found, plot)


@app.command("report")
def bench_report(
    paths: Paths,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("bench-report.html"),
) -> None:
    """One self-contained HTML page over measurements: pictures, tables, conditions, and what they do not show."""
    from legato.cli.pictures import write_report

    write_report(paths, output)
