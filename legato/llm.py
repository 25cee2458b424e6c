"""The offline API: text or token ids in, completions or a stream out, with the engine in this process.

Joins the text side (tokenizer, chat template, stop strings) with the engine. Called by users and by the CLI.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from legato.config import CacheConfig, Config, ExecutionConfig, ScheduleConfig, from_environment
from legato.engine.start import Started, open_checkpoint, start
from legato.model.checkpoint import Progress, no_progress
from legato.schedule import Progress as RequestProgress
from legato.schedule import Request
from legato.server.chat import ChatTemplate
from legato.server.stream import TextStream
from legato.server.text import Tokenizer
from legato.types import Completion, Delta, FinishReason, SamplingParams, Stats, TokenLogprob

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    Args:
        model: directory or hub id of a GLM-5 family checkpoint; `None`: the small one that ships with Legato.
        num_drafts: drafts per iteration, 0..7; `None`: 5 if the checkpoint has an MTP layer.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        config: every other setting; the arguments above win over it.
        progress: called while weights load.

    Raises:
        CheckpointError, SpecError, ConfigError, TokenizerError: each names the file, field or setting and what to do.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        num_drafts: int | None = None,
        device: str | None = None,
        config: Config | None = None,
        progress: Progress = no_progress,
    ) -> None:
        config = config or Config()
        config = replace(
            config,
            model=model if model is not None else config.model,
            num_drafts=num_drafts if num_drafts is not None else config.num_drafts,
            execution=replace(config.execution, device=device) if device is not None else config.execution,
        )
        config = from_environment(config)
        checkpoint = open_checkpoint(config.model)
        self.tokenizer = Tokenizer.open(checkpoint)
        self.started: Started = start(config, checkpoint, progress)
        self._ids = itertools.count()
