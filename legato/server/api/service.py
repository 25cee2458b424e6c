"""What every route works with: the engine, the text side of the checkpoint, the settings and the metrics, under one name.

Owns the checks that are the same everywhere (which model, how many choices, which token ids) and the rule that long texts are
tokenized beside the event loop. Made by `server.app`, passed to the routers; nothing here is global.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.metadata
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from legato.config import PAGE_SIZE
from legato.server.engine.client import EngineClient
from legato.server.generation import Generations
from legato.server.http.errors import ApiError
from legato.server.settings import ServerSettings, name_of
from legato.server.telemetry.metrics import Metrics
from legato.server.text.chat_template import ChatError, ChatTemplate
from legato.server.text.tokenizer import TextFiles, Tokenizer
from legato.types import ParameterError, too_long

LONG_TEXT = 20_000
"""Characters from which a text is tokenized in a thread: shorter ones take less than a millisecond or two."""

SURELY_SHORT = 8
"""Characters per token of the context up to which a text is simply tokenized."""
SLICE, CUT = 65_536, 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of a checkpoint. `template` is `None` where the checkpoint cannot chat, for the reason in `no_template`."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    no_template: str = ""

    @classmethod
    def open(cls, files: TextFiles) -> ModelText:
        """From the files of a checkpoint (`server.text.Folder` of `EngineInfo.folder`).

        Raises:
            TokenizerError: there is no usable tokenizer.
            ChatError: the template cannot be compiled.
        """
        tokenizer = Tokenizer.open(files)
        try:
            return cls(tokenizer, ChatTemplate.open(files, tokenizer))
        except ChatError as error:
            if "no such file" not in str(error):
                raise
            return cls(tokenizer, None, "this checkpoint has no chat template: it completes text, but cannot chat")


@dataclass(frozen=True, slots=True)
class Service:
    """A running server's parts."""

    engine: EngineClient
    text: ModelText
    settings: ServerSettings
    metrics: Metrics
    generations: Generations
    model_names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, engine: EngineClient, text: ModelText, settings: ServerSettings, metrics: Metrics) -> Service:
        """The parts joined; a model without a name is called as its checkpoint was asked for."""
        names = settings.model_names or (name_of(engine.info.model),)
        generations = Generations(engine, text.tokenizer.stop_ids, metrics)
        return cls(engine, text, settings, metrics, generations, names)

    @property
    def is_able(self) -> bool:
        """Whether new requests are served."""
        return self.engine.state == "ready"

    def model(self, asked: str | None) -> str:
        """The name to reply with. Raises `ApiError` 404 for a model that is not served here."""
        if asked is None or asked in self.model_names:
            return asked or self.model_names[0]
        if self.settings.any_model:
            return self.model_names[0]
        near = difflib.get_close_matches(asked[:256], self.model_names, n=1, cutoff=0.6) or self.model_names[:1]
        raise ApiError(
            404,
            f"the model {asked[:64]!r} is not served here; did you mean {near[0]!r}?",
            param="model",
            code="model_not_found",
        )

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises `ApiError` 400 where the checkpoint has none."""
        if self.text.template is None:
            raise ApiError(400, self.text.no_template, param="messages")
        return self.text.template

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Raises `ParameterError` where a request asks for too many answers at once."""
        limit = self.settings.limits.max_choices
        if num_prompts * n > limit:
            raise ParameterError("n", f"{num_prompts} prompts times n = {n} are more than {limit} choices")

    def check_ids(self, ids: Sequence[int], field_name: str) -> tuple[int, ...]:
        """Token ids of a prompt, checked against the vocabulary and the context. Raises `ParameterError`, `ApiError`."""
        size = self.engine.info.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            position = next(place for place, token in enumerate(ids) if not 0 <= token < size)
            raise ParameterError(
                f"{field_name}[{position}]", f"must be a token id from 0 to {size - 1}, got {ids[position]}"
            )
        return self.check_length(ids, field_name)

    def check_length(self, ids: Sequence[int], field_name: str) -> tuple[int, ...]:
        """Refuses a prompt that no context holds before it is sent anywhere. Raises `ParameterError`, `ApiError`."""
        if not ids:
            raise ParameterError(field_name, "the prompt has no tokens")
        context = self.engine.info.context
        if len(ids) >= context:
            raise ApiError(
                400,
                f"{field_name}: {too_long(str(len(ids)), context)}",
                param=field_name,
                code="context_length_exceeded",
            )
        return tuple(ids)

    def check_text(self, texts: Iterable[str], field_name: str) -> None:
        """Refuses texts that are far too long for the context after tokenizing a part of them: the whole could take a minute.

        Raises:
            ApiError: there are more tokens than the context holds.
        """
        context, count = self.engine.info.context, 0
        several = list(texts)
        if sum(map(len, several)) <= SURELY_SHORT * context:
            return
        for text in several:
            for start in range(0, len(text), SLICE):
                # A cut may split a token; no cut makes as many as CUT out of fewer.
                count += max(0, len(self.text.tokenizer.encode(text[start : start + SLICE])) - CUT)
                if count >= context:
                    raise ApiError(
                        400,
                        f"{field_name}: {too_long(f'more than {count}', context)}",
                        param=field_name,
                        code="context_length_exceeded",
                    )

    def room_for(self, asked: int | None, prompt_len: int) -> int | None:
        """What is asked for as an upper bound; `None` where the context or the cache ends before it, and the answer with it."""
        info = self.engine.info
        # The last token is never run, so it needs no place in a page.
        most = min(info.context, -(-info.cache_tokens // PAGE_SIZE) * PAGE_SIZE + 1)
        return None if asked is not None and prompt_len + asked > most else asked

    def check_minimum(self, min_tokens: int, prompt_len: int) -> None:
        """Raises `ParameterError` where the context ends before an answer may."""
        room = self.engine.info.context - prompt_len
        if min_tokens > room:
            raise ParameterError(
                "min_tokens",
                f"{min_tokens} is more than the context has room for: {room} behind a prompt of {prompt_len} tokens",
            )

    async def beside(self, work: Callable[[], T], num_characters: int) -> T:
        """Runs `work` on a text of so many characters: in a thread where that could hold up other requests' tokens."""
        return await asyncio.to_thread(work) if num_characters > LONG_TEXT else work()


def legato_version() -> str:
    """The version of the installed package; of a bare source tree there is none to tell."""
    try:
        return importlib.metadata.version("legato")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
