"""What runs in the engine's process: an engine that knows the tokenizer of its checkpoint, for the sake of grammars.

The one place of that process that joins the text side with the engine; `engine` knows nothing of text, `server` nothing of
tensors. Named on the command line of `engine.process`, which calls it.
"""

from __future__ import annotations

from legato.config import Config, ConfigError, from_environment
from legato.engine.messages import EngineInfo
from legato.engine.profile import TraceProfiler
from legato.engine.ranks.lead import start
from legato.engine.serving import OnProgress, Served
from legato.engine.start import open_checkpoint
from legato.llm import vocabulary_of
from legato.model.inventory import stored_spec
from legato.ops import BindError
from legato.runtime.grammar import Grammars, Vocabulary
from legato.server.text.tokenizer import Tokenizer
from legato.types import Grammar

TEXT_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What the server's process reads of a checkpoint, besides `config.json`."""


def assemble(config: Config, progress: OnProgress) -> Served:
    """An engine for `config`.

    Raises:
        CheckpointError, SpecError, ConfigError, TokenizerError: each names the file, field or setting and what to do.
    """
    config = from_environment(config)
    checkpoint = open_checkpoint(config.model)
    tokenizer = Tokenizer.open(checkpoint.source)
    for name in TEXT_FILES:
        checkpoint.source.text(name)  # fetches it, where the source is remote
    try:
        started = start(config, checkpoint, progress)
    except BindError as error:
        raise ConfigError(f"ops: {error}") from error
    settings, vocab_size = started.settings, started.spec.vocab_size
    num_ranks = config.execution.tensor_parallel
    started.engine.runner.grammars = _warm_grammars(vocabulary_of(tokenizer, vocab_size))
    info = EngineInfo(
        model=config.model or checkpoint.label,
        folder=str(checkpoint.file("config.json").parent),
        device=settings.device if num_ranks == 1 else f"{settings.device.split(':')[0]}, {num_ranks} ranks",
        context=settings.context,
        cache_tokens=settings.cache_tokens,
        num_drafts=settings.num_drafts,
        max_running=settings.max_running,
        vocab_size=vocab_size,
        load_seconds=0.0,
        latent=settings.latent,
        index=settings.index,
        score_bytes=settings.score_bytes,
    )
    return Served(started.engine, info, TraceProfiler(), started.watch)


def grammars_of(config: Config) -> Grammars:
    """Warm grammars for the tokenizer of a checkpoint: what a rank other than 0 needs of the text side."""
    checkpoint = open_checkpoint(config.model)
    tokenizer = Tokenizer.open(checkpoint.source)
    return _warm_grammars(vocabulary_of(tokenizer, stored_spec(checkpoint).vocab_size))


def _warm_grammars(vocabulary: Vocabulary) -> Grammars:
    """Compiles a first grammar now: it takes a large vocabulary about a second, which running requests would have to wait for."""
    grammars = Grammars(vocabulary)
    if vocabulary.end_ids:  # without them every grammar is refused
        grammars.check(Grammar("regex", "."))
    return grammars
