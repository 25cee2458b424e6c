"""Options that several subcommands share: their names and help.

Owns the spelling of flags; what they become is in `cli.flags`. Imports no torch. Called by `cli.flags` and `cli.serve_flags`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from legato.config import DenseFormatName, DType, IndexFormat, LatentFormat, Switch


def drafts_named(value: str) -> int | str:
    """A number of drafts, or "auto"; `Config` says which numbers may be."""
    return value if value == "auto" else int(value)


ENGINE, SAMPLING, CONSTRAINTS = "Engine options", "Sampling options", "Constraint options"
OUTPUT = "Output options"

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Directory or hub id; by default the checkpoint that ships with Legato.",
        rich_help_panel=ENGINE, show_default=False,
    ),
]  # fmt: skip
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)]
NumDrafts = Annotated[
    Any,  # an int, "auto" or None: typer knows no such type
    typer.Option(
        "--num-drafts", "-k", parser=drafts_named, metavar="INTEGER|auto", rich_help_panel=ENGINE, show_default=False,
        help="Tokens drafted per iteration, 0 to 7; by default 5, or 0 without an MTP layer; auto: what is measured to be best.",
    ),
]  # fmt: skip
DraftThreshold = Annotated[
    float,
    typer.Option(
        help="Drafts that are less likely (0 to 1), with those before them, are not verified.", rich_help_panel=ENGINE
    ),
]
Slowdown = Annotated[
    float | None,
    typer.Option(
        help="While a prompt runs, the others' iterations take at most so many times their own time; 0: no such bound; "
        "by default 2 on a GPU, 0 on a CPU.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and output together, in tokens; by default what the checkpoint states.",
        rich_help_panel=ENGINE, show_default=False,
    ),
]  # fmt: skip
Latent = Annotated[LatentFormat, typer.Option(help="Format of the latent cache.", rich_help_panel=ENGINE)]
Index = Annotated[IndexFormat, typer.Option(help="Format of the index keys.", rich_help_panel=ENGINE)]
DraftWeights = Annotated[
    str,
    typer.Option(
        help="Of the MTP layer: stored, lean, or what is made smaller, with commas: experts, projection, table, split, head, "
        "vocabulary=N or =FILE (no token changes); auto: all but a vocabulary on a GPU with kernels for it, else stored.",
        rich_help_panel=ENGINE,
    ),
]
DenseFormat = Annotated[
    DenseFormatName,
    typer.Option(
        help="Of attention, dense layers, shared experts: stored, or fp8 (what is unquantised in FP8 blocks; tokens may change).",
        rich_help_panel=ENGINE,
    ),
]
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
    int | None,
    typer.Option(
        help="Most tokens of prompts that run in one pass; by default 2048 on a GPU, 512 on a CPU.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens the cache holds over all requests; by default --max-running full contexts, at most 64 Ki on a CPU.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        help="In place of --cache-tokens: the share of a GPU's memory that weights and caches fill together, such as 0.85.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option("--prefix-cache/--no-prefix-cache", help="Keep prompts for later requests.", rich_help_panel=ENGINE),
]
HostTokens = Annotated[
    int,
    typer.Option(help="Tokens of evicted prompts that are kept in host memory; 0 is none.", rich_help_panel=ENGINE),
]
ScoreBudget = Annotated[
    int | None,
    typer.Option(
        help="Most memory for index scores, in MiB; by default 64 on a CPU, 1024 on a GPU.",
        rich_help_panel=ENGINE,
        show_default=False,
        metavar="MIB",
    ),
]
Dtype = Annotated[
    DType,
    typer.Option(help="Of activations; auto is bfloat16 on a GPU and float32 on a CPU.", rich_help_panel=ENGINE),
]
Graphs = Annotated[
    Switch, typer.Option(help="Decode with CUDA graphs, captured at start; auto: on a GPU.", rich_help_panel=ENGINE)
]
KernelCache = Annotated[
    str | None,
    typer.Option(
        help="Directory of compiled kernels; by default ~/.cache/legato/kernels.",
        rich_help_panel=ENGINE,
        show_default=False,
        metavar="DIR",
    ),
]
Overlap = Annotated[
    Switch,
    typer.Option(help="Plan an iteration while the one before it runs; auto: on a GPU.", rich_help_panel=ENGINE),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp", help="Ranks that share the model: as many GPUs (on a CPU: processes).", rich_help_panel=ENGINE
    ),
]
RankPatience = Annotated[
    float,
    typer.Option(
        help="With several ranks: seconds that one may keep the others waiting before the engine gives up.",
        rich_help_panel=ENGINE,
    ),
]
TwoShotRows = Annotated[
    int | None,
    typer.Option(
        help="On several GPUs: sums of at least so many rows go in two shots; by default as many as take longer across the "
        "links in one (eight GPUs and GLM-5.2: 27). What pays here, `legato bench ops reduce --ranks N` says.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
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
MinTokens = Annotated[int, typer.Option(help="The text cannot end before so many tokens.", rich_help_panel=SAMPLING)]
Samples = Annotated[int, typer.Option("--n", "-n", help="Samples of each prompt.", rich_help_panel=SAMPLING)]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id", help="Token that ends the text; may be repeated.", rich_help_panel=SAMPLING,
        show_default=False,
    ),
]  # fmt: skip
PresencePenalty = Annotated[
    float, typer.Option(help="Taken from the logit of every token generated so far.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="The same for every time it was generated.", rich_help_panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(help="Divides the logits of tokens in prompt or text; 1 is off.", rich_help_panel=SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        help="Added to the logit of a token id, -100 to 100; -100 bans it; may be repeated.",
        rich_help_panel=CONSTRAINTS, show_default=False, metavar="ID=VALUE",
    ),
]  # fmt: skip
AllowedTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--allowed-token-id", help="The only token ids there are; may be repeated.", rich_help_panel=CONSTRAINTS,
        show_default=False,
    ),
]  # fmt: skip
BadTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--bad-token-id", help="Token id that may not be generated; may be repeated.", rich_help_panel=CONSTRAINTS,
        show_default=False,
    ),
]  # fmt: skip
JsonSchema = Annotated[
    str | None,
    typer.Option(
        help="The text is JSON that fits this schema.", rich_help_panel=CONSTRAINTS, show_default=False,
        metavar="TEXT|@FILE",
    ),
]  # fmt: skip
Regex = Annotated[
    str | None,
    typer.Option(
        help="The text matches this expression.", rich_help_panel=CONSTRAINTS, show_default=False,
        metavar="TEXT|@FILE",
    ),
]  # fmt: skip
Grammar = Annotated[
    str | None,
    typer.Option(
        help="The text is a `start` of this grammar in Lark notation. @FILE reads it (or one of the above) from a file.",
        rich_help_panel=CONSTRAINTS, show_default=False, metavar="TEXT|@FILE",
    ),
]  # fmt: skip
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="Log-probabilities, and of so many alternatives, with --output json.", rich_help_panel=OUTPUT,
        show_default=False,
    ),
]  # fmt: skip
PromptLogprobs = Annotated[
    int | None,
    typer.Option(help="The same for the prompt.", rich_help_panel=OUTPUT, show_default=False),
]
