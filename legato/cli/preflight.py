"""What can be refused before torch is imported: a missing model, an unsupported one, no tokenizer, too long a context.

Owns the order of these checks; the checks themselves are the library's. Reads no tensor. Called by the subcommands that start
an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legato.checkpoints import SMALL
from legato.config import Config, from_environment, resolve
from legato.model.faults import CheckpointError, Problem
from legato.model.hub import open_source
from legato.model.source import Source
from legato.model.spec import ModelSpec, SpecError
from legato.schedule import RequestError
from legato.server.text.chat_template import ChatTemplate
from legato.server.text.tokenizer import Tokenizer, json_object
from legato.types import too_long


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known before the engine starts. `context` is the longest prompt and output together, in tokens."""

    config: Config
    source: Source
    tokenizer: Tokenizer
    context: int


def check(config: Config) -> Checked:
    """Refuses a model that is missing, unsupported or without a tokenizer, and settings that contradict it.

    Raises:
        CheckpointError, SpecError, ConfigError, TokenizerError: each says what is wrong and what to do.
    """
    config = from_environment(config)
    source, spec = describe(config.model)
    check_ranks(spec, config.execution.tensor_parallel)
    # Whether there is a GPU is only known once torch is there; settings that need one are settled again then.
    settings = resolve(config, max_position=spec.max_position, has_mtp=spec.has_mtp, cuda_available=True)
    return Checked(config, source, Tokenizer.open(source), settings.context)


def check_ranks(spec: ModelSpec, num_ranks: int) -> None:
    """Raises `SpecError` for a width that cannot be shared. What blocks of a format ask besides is said when tensors load."""
    widths = {
        "num_attention_heads": (spec.num_heads, "attention heads"),
        "intermediate_size": (spec.dense_intermediate, "columns of the dense layers"),
        "moe_intermediate_size": (spec.expert_intermediate, "columns of an expert"),
    }
    for field, (width, what) in widths.items():
        if width % num_ranks:
            raise SpecError(field, f"{width} {what} do not divide over {num_ranks} ranks; use fewer")


def check_prompts(config: Config, prompts: Sequence[str]) -> Config:
    """`check`, and that every prompt fits the context. Returns the settings to start with; raises `RequestError` too."""
    checked = check(config)
    for prompt in prompts:
        length = len(checked.tokenizer.encode_prompt(prompt))
        if length >= checked.context:
            raise RequestError(too_long(str(length), checked.context))
    return checked.config


def check_chat(config: Config, arguments: Mapping[str, Any]) -> Config:
    """`check`, and that there is a chat template that reads `arguments`. Raises `ChatError` too."""
    checked = check(config)
    ChatTemplate.open(checked.source, checked.tokenizer).render([{"role": "user", "content": ""}], **arguments)
    return checked.config


def describe(model: str | None) -> tuple[Source, ModelSpec]:
    """The files of a checkpoint and its architecture, from `config.json`; `None`: the one that ships with the package.

    Raises:
        CheckpointError, SpecError: there is no checkpoint, or its architecture is not supported.
    """
    source = open_source(SMALL if model is None else model)
    if source.text("config.json") is None:
        remedy = "Point at the folder that holds config.json and the *.safetensors files."
        raise CheckpointError(
            Problem(f"{source.label}/config.json", "", "the model configuration", "no such file", remedy)
        )
    return source, ModelSpec.from_config(json_object(source, "config.json"), name=source.label)
