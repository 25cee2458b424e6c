"""Loading a model with a progress bar, and the one line that says how fast it ran.

Owns what the terminal shows of loading and speed. Called by the subcommands that start an engine.
"""

from __future__ import annotations

import math

from rich.console import Console

from legato.cli.progress import LoadingDisplay
from legato.config import Config, ConfigError, score_rows
from legato.engine.messages import Loading
from legato.llm import LLM
from legato.ops import BindError
from legato.types import Stats


def load(config: Config, console: Console) -> LLM:
    """An engine for `config`; while the weights load, `console` shows a bar (nothing where it is no terminal).

    Raises:
        ConfigError: among others, an override names an op or implementation that does not exist.
    """
    display = LoadingDisplay(console)

    def show(done_bytes: int, total_bytes: int, label: str) -> None:
        display.show(Loading(label, done_bytes, total_bytes))

    try:
        llm = LLM(config=config, progress=show)
    except BindError as error:
        raise ConfigError(f"--op: {error}") from error
    finally:
        display.close()
    console.print(score_memory(llm.settings.score_bytes, llm.settings.context), style="dim", highlight=False)
    return llm


def score_memory(score_bytes: int, context: int) -> str:
    """What the indexer may use for its scores, and how many rows at a time that is when the context is full."""
    rows = score_rows(score_bytes, context)
    return f"index scores: {score_bytes >> 20} MiB budget, tiles of {rows:,} rows at context {context:,}"


def speed(stats: Stats) -> str:
    """Tokens, tokens per second and accept length, always apart; prefill is not part of the speed."""
    parts = [f"{stats.emitted_tokens} tokens"]
    if not math.isnan(stats.tokens_per_second):
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if not math.isnan(stats.accept_length):
        parts.append(f"accept length {stats.accept_length:.2f}")
    return ", ".join(parts)
