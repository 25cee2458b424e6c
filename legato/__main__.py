"""The command line: one function per subcommand, each of which only fills settings and imports what does the work.

Owns the list of subcommands and the exit codes: 0, or 2 with one message on stderr for whatever the user can put right. Knows
nothing of tensors; `legato --help` and every fault in the flags come without importing torch.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import legato
from legato.cli import flags, options, serve_flags
from legato.cli.bench_commands import app as bench_app
from legato.cli.serve_command import ServeCommand
from legato.config import from_environment, rank_from_environment

app = typer.Typer(
    name="legato", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="A serving engine for GLM-5.2, built for the lowest latency one node can give.",
)  # fmt: skip

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
    if (launched := rank_from_environment()) is not None and launched.rank:
        from legato.engine.ranks.follow import follow_launched

        follow_launched(from_environment(flags.engine()), launched)
    from legato.cli.serve_port import take

    taken = take(flags)
    from legato.cli.serve_checks import prepare

    prepared = prepare(flags, taken)
    from legato.cli.serve import run

    run(prepared)


app.command("serve", cls=ServeCommand)(flags.command(_serve, serve_flags.HELP, serve_flags.ServeFlags))


def _generate(what: flags.GenerateFlags, sampling: flags.SamplingFlags, engine: flags.EngineFlags) -> None:
    params = sampling.params(
        n=what.n, ignore_eos=what.ignore_eos, logprobs=what.logprobs, prompt_logprobs=what.prompt_logprobs
    )
    config = engine.engine()
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in what.prompts]
    from legato.cli import preflight

    config = preflight.check_prompts(config, texts)
    from legato.cli.generate import run

    run(config, texts, params, what.output)


app.command("generate")(
    flags.command(
        _generate, "Continues prompts. The text goes to stdout, the speed and the accept length to stderr.",
        flags.GenerateFlags, flags.SamplingFlags, flags.EngineFlags,
    )
)  # fmt: skip


def _chat(what: flags.ChatFlags, sampling: flags.ChatSamplingFlags, engine: flags.EngineFlags) -> None:
    params, config, arguments = sampling.params(), engine.engine(), what.arguments()
    from legato.cli import preflight

    config = preflight.check_chat(config, arguments)
    from legato.cli.chat import run

    run(config, params, what.system, arguments)


app.command("chat")(
    flags.command(
        _chat, "Talks in the terminal. Reasoning is shown dim; after every reply come speed and accept length. /exit leaves.",
        flags.ChatFlags, flags.ChatSamplingFlags, flags.EngineFlags,
    )
)  # fmt: skip


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Directory or hub id; only the headers are read.")],
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--gpus", help="Number of GPUs to plan for; may be repeated. By default 1, 2, 4 and 8.", show_default=False
        ),
    ] = None,
    gpu_memory: Annotated[float, typer.Option(help="Memory of one GPU in GB (10^9 bytes); an H200 has 150.")] = 150.0,
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


@app.command("validate")
def validate_server(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server, e.g. http://127.0.0.1:30000.")],
    model: Annotated[
        str, typer.Option(help="Name in the requests; by default the first that is served.", show_default=False)
    ] = "",
    api_key: Annotated[
        str, typer.Option(envvar="LEGATO_API_KEY", help="Sent as a bearer token.", show_default=False)
    ] = "",
    quality: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Ask what only a large model knows; auto: unless it is the checkpoint of the package."),
    ] = "auto",
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a check; may be repeated. By default all.", show_default=False)
    ] = None,
    accept_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt for the accept length.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a request counts as failed.")] = 600.0,
    output: Annotated[Literal["text", "json"], typer.Option(help="text, or JSON on stdout.")] = "text",
) -> None:
    """First run against a server: right answers, accept length beside the published one, known kinds of fault by name.

    Exit code 1 if a check fails, 2 if nobody can be asked.
    """
    from legato.cli.validate import Wanted, run

    knows_nothing = {"auto": None, "on": False, "off": True}[quality]
    wanted = Wanted(url, model, api_key, knows_nothing, tuple(only or ()), timeout, accept_tokens)
    if not run(wanted, output):
        raise typer.Exit(1)


@app.command()
def doctor(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP]...", help="Only these ops, or folders of ops; by default all.", show_default=False
        ),
    ] = None,
    device: options.Device = "auto",
    output: Annotated[Literal["text", "json"], typer.Option(help="text, or JSON on stdout.")] = "text",
) -> None:
    """Examines this machine: versions, GPU, and every op's results and speed here; says what is missing and the fix.

    Exit code 1 if something is broken.
    """
    from legato.cli.doctor import run

    if not run(device, ops or [], output):
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line; the user's faults end in one message and exit code 2, never in a traceback."""
    try:
        try:
            app(prog_name="legato")
        finally:
            sys.stdout.flush()
    except ValueError as error:
        from legato.cli.faults import EXIT_CODE, FAULTS, report

        if not isinstance(error, FAULTS):
            raise
        report(error)
        sys.exit(EXIT_CODE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        if error.errno == errno.ENOSPC:  # a reader that has left knows that it has
            print(f"legato: not everything could be written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail once more
        sys.exit(2)


if __name__ == "__main__":
    main()
