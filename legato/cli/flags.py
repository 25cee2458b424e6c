"""Flags as values: those of the engine, of sampling and of one subcommand, each a dataclass, and the command made of them.

Owns how flags become `Config` and `SamplingParams`. Imports no torch. Called by `legato.__main__` and `cli.serve_flags`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from legato.cli import options
from legato.config import (
    CacheConfig,
    Config,
    ConfigError,
    DenseFormatName,
    DType,
    ExecutionConfig,
    IndexFormat,
    LatentFormat,
    ScheduleConfig,
    Switch,
)
from legato.types import ParameterError, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What an engine is started with."""

    model: options.Model = None
    num_drafts: options.NumDrafts = None
    draft_threshold: options.DraftThreshold = 0.0
    device: options.Device = "auto"
    context: options.Context = None
    max_running: options.MaxRunning = ScheduleConfig().max_running
    max_waiting: options.MaxWaiting = None
    chunk_tokens: options.ChunkTokens = None
    slowdown: options.Slowdown = None
    cache_tokens: options.CacheTokens = None
    memory_fraction: options.MemoryFraction = None
    prefix_cache: options.PrefixCache = True
    host_tokens: options.HostTokens = 0
    latent: options.Latent = "auto"
    index: options.Index = "auto"
    dtype: options.Dtype = "auto"
    overlap: options.Overlap = "auto"
    graphs: options.Graphs = "auto"
    kernel_cache: options.KernelCache = None
    score_budget: options.ScoreBudget = None
    verify_speculation: options.VerifySpeculation = 0.0
    threads: options.Threads = None
    tensor_parallel: options.TensorParallel = 1
    rank_patience: options.RankPatience = ExecutionConfig().rank_patience
    two_shot_rows: options.TwoShotRows = None
    draft_weights: options.DraftWeights = "auto"
    dense_format: options.DenseFormat = "stored"
    op: options.Ops = None

    def engine(self) -> Config:
        """The settings that the flags name.

        Raises:
            ConfigError: a value is out of range, or an override is not of the form OP=NAME.
        """
        latent: LatentFormat = self.latent
        dense_format: DenseFormatName = self.dense_format
        index: IndexFormat = self.index
        dtype: DType = self.dtype
        overlap: Switch = self.overlap
        graphs: Switch = self.graphs
        return Config(
            model=self.model,
            num_drafts=self.num_drafts,
            draft_threshold=self.draft_threshold,
            cache=CacheConfig(
                latent, index, self.cache_tokens, self.prefix_cache, self.host_tokens, self.memory_fraction
            ),
            schedule=ScheduleConfig(self.max_running, self.chunk_tokens, self.context, self.max_waiting, self.slowdown),
            execution=ExecutionConfig(
                device=self.device,
                dtype=dtype,
                overlap=overlap,
                graphs=graphs,
                kernel_cache=self.kernel_cache,
                threads=self.threads,
                tensor_parallel=self.tensor_parallel,
                rank_patience=self.rank_patience,
                two_shot_rows=self.two_shot_rows,
                draft_weights=self.draft_weights,
                dense_format=dense_format,
                ops=overrides(self.op or []),
                score_bytes=None if self.score_budget is None else self.score_budget << 20,
            ),
            verify_speculation=self.verify_speculation,
        )


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How a reply is sampled, whoever asks for it."""

    max_tokens: options.MaxTokens = None
    min_tokens: options.MinTokens = 0
    temperature: options.Temperature = 1.0
    top_k: options.TopK = 0
    top_p: options.TopP = 1.0
    min_p: options.MinP = 0.0
    seed: options.Seed = None
    presence_penalty: options.PresencePenalty = 0.0
    frequency_penalty: options.FrequencyPenalty = 0.0
    repetition_penalty: options.RepetitionPenalty = 1.0
    stop: options.Stop = None
    stop_token_ids: options.StopTokenIds = None
    logit_bias: options.LogitBias = None
    allowed_token_ids: options.AllowedTokenIds = None
    bad_token_ids: options.BadTokenIds = None
    json_schema: options.JsonSchema = None
    regex: options.Regex = None
    grammar: options.Grammar = None

    def params(self, **more: Any) -> SamplingParams:
        """The parameters that the flags name, and `more` of them. Raises `ParameterError`."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_bias(self.logit_bias or []),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_token_ids=tuple(self.bad_token_ids or ()),
            json_schema=_text_of("json_schema", self.json_schema),
            regex=_text_of("regex", self.regex),
            grammar=_text_of("grammar", self.grammar),
            **more,
        )


@dataclass(frozen=True, slots=True)
class ChatSamplingFlags(SamplingFlags):
    """The same in a conversation, where the tail of the distribution is cut unless asked for."""

    top_p: options.TopP = 0.95


@dataclass(frozen=True, slots=True)
class GenerateFlags:
    """What `legato generate` continues, how often, and what it prints."""

    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="Texts to continue, as one batch; - reads stdin.")
    ]
    n: options.Samples = 1
    ignore_eos: options.IgnoreEos = False
    output: Annotated[
        Literal["text", "json"],
        typer.Option(help="text, or one JSON object per completion.", rich_help_panel=options.OUTPUT),
    ] = "text"
    logprobs: options.Logprobs = None
    prompt_logprobs: options.PromptLogprobs = None


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """What stands at the start of a conversation, and how the chat template is filled."""

    system: Annotated[str | None, typer.Option(help="The system message.", show_default=False)] = None
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Reason before answering.", show_default=False)
    ] = None
    reasoning_effort: Annotated[
        str | None, typer.Option(help="As the chat template understands it: high or max.", show_default=False)
    ] = None

    def arguments(self) -> dict[str, Any]:
        """What was given of the template's arguments."""
        given = {"enable_thinking": self.thinking, "reasoning_effort": self.reasoning_effort}
        return {name: value for name, value in given.items() if value is not None}


def command(run: Callable[..., None], text: str, *groups: type[Any]) -> Callable[..., None]:
    """A function for typer with one parameter per field of the `groups`, dataclasses whose fields are options.

    It calls `run` with one value of each; `text` is its help.
    """

    def called(**given: Any) -> None:
        run(*(group(**{item.name: given[item.name] for item in fields(group)}) for group in groups))

    hints = {name: hint for group in groups for name, hint in get_type_hints(group, include_extras=True).items()}
    called.__doc__ = text
    parameters = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for group in groups
        for item in fields(group)
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {**hints, "return": None}
    return called


def overrides(given: list[str]) -> dict[str, str]:
    """`OP=NAME`, each, as a mapping. Raises `ConfigError` for anything of another form."""
    found: dict[str, str] = {}
    for override in given:
        name, equals, implementation = override.partition("=")
        if not (name and equals and implementation):
            raise ConfigError(f"--op must look like attend=reference, got {override!r}")
        found[name] = implementation
    return found


def numbers(name: str, text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers; K's of 1024 as `1K`, and 1024 of these as `1M`. Raises ConfigError with the option's name."""
    units = {"K": 1 << 10, "M": 1 << 20}
    try:
        return tuple(
            units[part[-1].upper()] * int(part[:-1]) if part[-1].upper() in units else int(part)
            for part in (piece.strip() for piece in text.split(",")) if part
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"{name} must be whole numbers separated by commas, got {text!r}") from error


def _bias(given: list[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in given:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError as error:
            raise ParameterError("logit_bias", f"must look like 15=-2.5, got {entry!r}") from error
    return bias


def _text_of(name: str, given: str | None) -> str | None:
    """The text of an option, or of the file that it names with @."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ParameterError(name, f"cannot read {given[1:]}: {why}") from error
