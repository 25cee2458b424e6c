"""Options that several subcommands share: their names and help, and how they become `Config`.

Owns the spelling of flags. Imports no torch. Called by `legato.__main__`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from legato.config import CacheConfig, Config, ConfigError, ExecutionConfig, IndexFormat, LatentFormat, ScheduleConfig

ENGINE, SAMPLING = "Engine options", "Sampling options"

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Directory or hub id; by default the checkpoint that ships with Legato.",
        rich_help_panel=ENGINE, show_default=False,
    ),
]  # fmt: skip
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)]
NumDrafts = Annotated[
    int | None,
    typer.Option(
        "--num-drafts", "-k", help="Tokens drafted per iteration, 0 to 7; by default 5, or 0 without an MTP layer.",
        rich_help_panel=ENGINE, show_default=False,
    ),
]  # fmt: skip
Context = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and output together, in tokens; by default what the checkpoint states.",
        rich_help_panel=ENGINE, show_default=False,
    ),
]  # fmt: skip
Latent = Annotated[LatentFormat, typer.Option(help="Format of the latent cache.", rich_help_panel=ENGINE)]
Index = Annotated[IndexFormat, typer.Option(help="Format of the index keys.", rich_help_panel=ENGINE)]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads; by default one core less than there are, at most 4.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
Ops = Annotated[
    list[str] | None,
    typer.Option(
        "--op", help="Overrides the implementation of one op, e.g. attend=reference; may be repeated.",
        rich_help_panel=ENGINE, show_default=False, metavar="OP=NAME",
    ),
]  # fmt: skip

MaxRunning = Annotated[int, typer.Option(help="Most requests in one iteration.", rich_help_panel=ENGINE)]
MaxWaiting = Annotated[
    int | None,
    typer.Option(
        help="Most requests that wait before further ones are refused; by default any number.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
ChunkTokens = Annotated[
    int, typer.Option(help="Most tokens of prompts that run in one iteration.", rich_help_panel=ENGINE)
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens the cache holds over all requests; by default --max-running full contexts, at most 64 Ki on a CPU.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option("--prefix-cache/--no-prefix-cache", help="Keep prompts for later requests.", rich_help_panel=ENGINE),
]
VerifySpeculation = Annotated[
    float,
    typer.Option(
        help="Share of requests (0 to 1) that are replayed without drafts, to see that the tokens are the same.",
        rich_help_panel=ENGINE,
    ),
]

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens to generate; by default what the context has room for.",
        rich_help_panel=SAMPLING,
        show_default=False,
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the most likely tokens up to this mass; 1 is off.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float, typer.Option(help="Keep tokens at least this likely relative to the most likely.", rich_help_panel=SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.", rich_help_panel=SAMPLING, show_default=False)]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends the generation; may be repeated.", rich_help_panel=SAMPLING, show_default=False),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the end token (for measuring).", rich_help_panel=SAMPLING)
]


def engine_config(
    *,
    model: str | None,
    device: str,
    num_drafts: int | None,
    context: int | None,
    latent: LatentFormat,
    index: IndexFormat,
    threads: int | None,
    ops: list[str] | None,
) -> Config:
    """The settings that the flags name.

    Raises:
        ConfigError: a value is out of range, or an override is not of the form OP=NAME.
    """
    overrides: dict[str, str] = {}
    for override in ops or []:
        name, equals, implementation = override.partition("=")
        if not (name and equals and implementation):
            raise ConfigError(f"--op must look like attend=reference, got {override!r}")
        overrides[name] = implementation
    return Config(
        model=model,
        num_drafts=num_drafts,
        cache=CacheConfig(latent=latent, index=index),
        schedule=ScheduleConfig(context=context),
        execution=ExecutionConfig(device=device, threads=threads, ops=overrides),
    )
