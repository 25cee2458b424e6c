"""The command line: one function per subcommand, each of which only fills settings and imports what does the work.

Owns the list of subcommands and the exit codes: 0, or 2 with one message on stderr for whatever the user can put right. Knows
nothing of tensors; `legato --help` and every fault in the flags come without importing torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import legato
from legato.cli import options, serve_flags
from legato.cli.serve_command import ServeCommand
from legato.types import SamplingParams

app = typer.Typer(
    name="legato", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="A serving engine for GLM-5.2, built for the lowest latency one node can give.",
)  # fmt: skip

bench_app = typer.Typer(no_args_is_help=True, help="Measures Legato on this machine.")
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"legato {legato.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A serving engine for GLM-5.2, built for the lowest latency one node can give."""


def _serve(flags: serve_flags.ServeFlags) -> None:
    from legato.cli.serve_checks import prepare

    prepared = prepare(flags)
    from legato.cli.serve import run

    run(prepared)


app.command("serve", cls=ServeCommand)(serve_flags.command(_serve, serve_flags.HELP))


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="Texts to continue, as one batch; - reads stdin.")
    ],
    model: options.Model = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    output: Annotated[Literal["text", "json"], typer.Option(help="text, or one JSON object per prompt.")] = "text",
    num_drafts: options.NumDrafts = None,
    device: options.Device = "auto",
    context: options.Context = None,
    latent: options.Latent = "auto",
    index: options.Index = "auto",
    threads: options.Threads = None,
    op: options.Ops = None,
) -> None:
    """Continues prompts. The text goes to stdout, the speed and the accept length to stderr."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        stop=tuple(stop or ()), ignore_eos=ignore_eos,
    )  # fmt: skip
    config = options.engine_config(
        model=model,
        device=device,
        num_drafts=num_drafts,
        context=context,
        latent=latent,
        index=index,
        threads=threads,
        ops=op,
    )
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    from legato.cli import preflight

    config = preflight.check_prompts(config, texts)
    from legato.cli.generate import run

    run(config, texts, params, output)


@app.command()
def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="The system message.", show_default=False)] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Reason before answering.", show_default=False)
    ] = None,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="As the chat template understands it: high or max.", show_default=False)
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    num_drafts: options.NumDrafts = None,
    device: options.Device = "auto",
    context: options.Context = None,
    latent: options.Latent = "auto",
    index: options.Index = "auto",
    threads: options.Threads = None,
    op: options.Ops = None,
) -> None:
    """Talks in the terminal. Reasoning is shown dim; after every reply come speed and accept length. /exit leaves."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    config = options.engine_config(
        model=model,
        device=device,
        num_drafts=num_drafts,
        context=context,
        latent=latent,
        index=index,
        threads=threads,
        ops=op,
    )
    given = {"enable_thinking": thinking, "reasoning_effort": reasoning_effort}
    arguments = {name: value for name, value in given.items() if value is not None}
    from legato.cli import preflight

    config = preflight.check_chat(config, arguments)
    from legato.cli.chat import run

    run(config, params, system, arguments)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Directory or hub id; only the headers are read.")],
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--gpus", help="Number of GPUs to plan for; may be repeated. By default 1, 2, 4 and 8.", show_default=False
        ),
    ] = None,
    gpu_memory: Annotated[float, typer.Option(help="Memory of one GPU in GB (10^9 bytes).")] = 141.0,
) -> None:
    """Says what a checkpoint needs: memory per GPU by part, cache bytes per token, longest context, faults.

    Exit code 2 if it cannot run, with the reason.
    """
    from legato.cli import preflight

    preflight.describe(model)
    from legato.cli.checkpoints import show_plan

    if not show_plan(model, ranks or [1, 2, 4, 8], gpu_memory):
        raise typer.Exit(2)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Directory or hub id of a BF16 checkpoint.")],
    destination: Annotated[Path, typer.Argument(help="Directory to write; it appears complete or not at all.")],
    target: Annotated[
        Literal["fp8", "nvfp4", "int4", "int4-fp8"],
        typer.Option("--format", "-f", help="Format of the routed experts (fp8: of all linears)."),
    ],
    shard_size: Annotated[float, typer.Option(help="Most megabytes (10^6 bytes) per file.")] = 5000.0,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a checkpoint that is already there.")] = False,
) -> None:
    """Writes a BF16 checkpoint again as FP8 (128x128 blocks), NVFP4 or INT4 (groups of 128)."""
    from legato.cli import preflight

    preflight.describe(model)
    from legato.cli.checkpoints import Existing
    from legato.cli.checkpoints import quantize as write

    write(model, destination, target, Existing.REPLACE if replace else Existing.REFUSE, round(shard_size * 1e6))


@bench_app.command("ops")
def bench_ops(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders of ops, e.g. gemm; by default all.", show_default=False),
    ] = None,
    implementation: Annotated[
        str,
        typer.Option(
            "--implementation", "-i", help="A name such as sm90 or reference; best: what an engine would bind; all."
        ),
    ] = "best",
    case: Annotated[str, typer.Option(help="Only cases (or ops) whose name matches this shell pattern.")] = "*",
    device: options.Device = "auto",
    json: Annotated[
        Path | None, typer.Option(help="Append one JSON object per case to this file.", show_default=False)
    ] = None,
) -> None:
    """Times ops case by case, after checking each result, and compares with what memory and arithmetic allow.

    Exit code 1 if a result is wrong: wrong results have no time.
    """
    from legato.cli.bench import bench_ops as run

    if not run(folders or [], implementation, case, device, json):
        raise typer.Exit(1)


@bench_app.command("serve")
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
    input_tokens: Annotated[
        int | None, typer.Option(help="About so long a prompt (4 characters a token).", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.")] = 128,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="By default the server's own.", show_default=False)
    ] = None,
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
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.", show_default=False)
    ] = None,
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


def main() -> None:
    """Runs the command line; the user's faults end in one message and exit code 2, never in a traceback."""
    try:
        app(prog_name="legato")
    except ValueError as error:
        from legato.cli.faults import EXIT_CODE, FAULTS, report

        if not isinstance(error, FAULTS):
            raise
        report(error)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
