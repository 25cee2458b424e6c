"""The offline API: text or token ids in, completions or a stream out, with the engine in this process.

Joins the text side (tokenizer, chat template, stop strings) with the engine. Called by users and by the command line.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from legato.config import Config, from_environment
from legato.engine.ranks.lead import start
from legato.engine.start import open_checkpoint
from legato.model.checkpoint import Progress, no_progress
from legato.runtime.grammar import Grammars, Vocabulary
from legato.schedule import Progress as RequestProgress
from legato.schedule import Request
from legato.server.answer.constraint import constrained
from legato.server.text.chat_template import ChatPrompt, ChatTemplate
from legato.server.text.stream import TextStream
from legato.server.text.tokenizer import Tokenizer
from legato.types import (
    Completion,
    Delta,
    FinishReason,
    ParameterError,
    SamplingParams,
    Stats,
    TokenLogprob,
    samples_of,
)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    Args:
        model: directory or hub id of a GLM-5 family checkpoint; `None`: the small one that ships with Legato.
        num_drafts: K, drafts per iteration, 0..7; `None`: 5 if the checkpoint has an MTP layer.
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
            model=config.model if model is None else model,
            num_drafts=config.num_drafts if num_drafts is None else num_drafts,
            execution=config.execution if device is None else replace(config.execution, device=device),
        )
        config = from_environment(config)
        self.checkpoint = open_checkpoint(config.model)
        self.tokenizer = Tokenizer.open(self.checkpoint.source)
        started = start(config, self.checkpoint, progress)
        self.spec, self.settings = started.spec, started.settings
        self._engine = started.engine
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()

    @property
    def stats(self) -> Stats:
        """Counters since the start, or since `reset_stats`."""
        return self._engine.stats

    def reset_stats(self) -> None:
        """Starts the counters anew."""
        self._engine.reset_stats()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a plain prompt (as the tokenizer frames one), or the given ids, checked.

        Raises:
            ParameterError: an id is not in the vocabulary.
        """
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode_prompt(prompt))
        for position, token in enumerate(prompt):
            if not 0 <= token < self.spec.vocab_size:
                raise ParameterError(
                    "prompt", f"token {position} is {token}; the vocabulary has {self.spec.vocab_size}"
                )
        return tuple(prompt)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, **arguments: Any
    ) -> ChatPrompt:
        """The prompt of a conversation, by the checkpoint's own template. Raises `ChatError`."""
        if self._template is None:
            self._template = ChatTemplate.open(self.checkpoint.source, self.tokenizer)
        return self._template.render(messages, tools, **arguments)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completes prompts together, as one batch.

        Args:
            prompts: one text or list of token ids, or a list of such prompts.
            params: for all prompts, or one for each; the default samples at temperature 1 up to the context length.

        Returns:
            `n` completions per prompt, in order: all of the first prompt, then all of the second.

        Raises:
            ParameterError, RequestError: a prompt or parameter cannot be served; nothing has run then.
        """
        batch = _batch(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise ParameterError("params", f"{len(each)} for {len(batch)} prompts: give one, or one for each")
        prompts_and_params = [
            (ids, sample)
            for ids, settings in zip(map(self.encode, batch), each, strict=True)
            for sample in samples_of(settings)
        ]
        return self._complete([ids for ids, _ in prompts_and_params], [sample for _, sample in prompts_and_params])

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Message] | None = None,
        **arguments: Any,
    ) -> Completion:
        """The assistant's next turn, reasoning and tool calls included as the model wrote them.

        Args:
            messages: OpenAI-style messages.
            params: how to sample. A grammar holds for the answer: behind `</think>` where the answer starts with reasoning.
            tools: OpenAI-style tool definitions.
            arguments: for the chat template, such as `enable_thinking=False`.

        Raises:
            ChatError: messages, tools or arguments are not acceptable.
            ParameterError, RequestError: as in `generate`.
        """
        prompt = self.render(messages, tools, **arguments)
        return self._complete([prompt.ids], [self._single(prompt, params)])[0]

    def stream(self, prompt: Prompt | ChatPrompt, params: SamplingParams | None = None) -> Generator[Delta]:
        """Yields text as it comes; closing the iterator ends the request.

        Raises:
            ParameterError, RequestError: as in `generate`.
        """
        ids = prompt.ids if isinstance(prompt, ChatPrompt) else self.encode(prompt)
        reply = self._submit(ids, self._single(prompt, params))
        try:
            while reply.finish_reason is None:
                for progress in self._engine.turn():
                    if progress.request_id == reply.id:
                        delta = reply.take(progress)
                        if reply.stopped:
                            self._engine.abort(reply.id)
                        if delta.text or delta.token_ids or delta.finish_reason:
                            yield delta
        finally:
            self._finish([reply])

    def _complete(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        replies: dict[str, _Reply] = {}
        try:
            for ids, settings in zip(prompts, params, strict=True):
                reply = self._submit(ids, settings)
                replies[reply.id] = reply
            while any(reply.finish_reason is None for reply in replies.values()):
                for progress in self._engine.turn():
                    reply = replies.get(progress.request_id)
                    if reply is not None and reply.finish_reason is None:
                        reply.take(progress)
                        if reply.stopped:
                            self._engine.abort(reply.id)
        finally:
            self._finish(list(replies.values()))
        return [reply.completion() for reply in replies.values()]

    def _single(self, prompt: Prompt | ChatPrompt, params: SamplingParams | None) -> SamplingParams:
        """Parameters for one reply; where it starts with reasoning, a grammar waits for the end of it, and its budget counts."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ParameterError("n", f"must be 1 for a single reply, got {params.n}; `generate` takes more")
        if not isinstance(prompt, ChatPrompt):
            return params
        return constrained(params, self.tokenizer, in_reasoning=prompt.in_reasoning)

    def _submit(self, ids: Sequence[int], params: SamplingParams) -> _Reply:
        if params.constraint is not None and self._engine.runner.grammars is None:
            self._engine.runner.grammars = Grammars(vocabulary_of(self.tokenizer, self.spec.vocab_size))
        ends = () if params.ignore_eos else tuple(sorted(self.tokenizer.stop_ids))
        request = Request(
            id=f"request-{next(self._ids)}",
            prompt=tuple(ids),
            params=params,
            stop_ids=tuple(dict.fromkeys(ends + params.stop_token_ids)),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )
        self._engine.submit(request)
        reply = _Reply(request.id, len(request.prompt), TextStream(self.tokenizer, params.stop))
        if params.prompt_logprobs is not None:
            reply.prompt_logprobs = [None for _ in request.prompt]
        return reply

    def _finish(self, replies: Sequence[_Reply]) -> None:
        """Ends what an error or a closed stream left running, and lands what is in the air."""
        for reply in replies:
            if reply.finish_reason is None:
                self._engine.abort(reply.id)
        while self._engine.has_work:
            self._engine.turn()


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call; a single text or list of token ids is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


@dataclass(slots=True)
class _Reply:
    """One request's answer while it grows: tokens become text, and a completed stop string ends it inside an iteration."""

    id: str
    prompt_tokens: int
    stream: TextStream
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stopped: bool = False
    cached_tokens: int = 0

    def take(self, progress: RequestProgress) -> Delta:
        """Adds what a turn brought."""
        self.cached_tokens = progress.cached_tokens
        if progress.prompt_logprobs is not None and self.prompt_logprobs is not None:
            # By position: a prompt that runs again after a preemption brings the same values again.
            start, some = progress.prompt_logprobs.start, progress.prompt_logprobs.logprobs
            self.prompt_logprobs[start : start + len(some)] = some
        piece = self.stream.push(progress.tokens)
        text, reason = piece.text, progress.finish_reason
        if piece.stop is not None:
            self.stopped, reason = reason is None, "stop"
        elif reason is not None:
            rest = self.stream.finish()
            text += rest.text
            reason = "stop" if rest.stop is not None else reason
        token_ids = progress.tokens[: piece.num_tokens]
        logprobs = None if progress.logprobs is None else progress.logprobs[: piece.num_tokens]
        self.text += text
        self.token_ids += token_ids
        if logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(logprobs)
        self.finish_reason = reason
        return Delta(text, token_ids, reason, logprobs)

    def completion(self) -> Completion:
        """The finished answer."""
        return Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "abort",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """What grammars must know of a tokenizer; ids that a padded vocabulary has beyond it are never allowed."""
    tokens = [tokenizer.token_bytes(index) for index in range(vocab_size)]
    for text, index in tokenizer.control.items():
        tokens[index] = text.encode()
    control_ids, end_ids = frozenset(tokenizer.control.values()), tuple(sorted(tokenizer.stop_ids))
    return Vocabulary(tuple(tokens), control_ids, end_ids, tokenizer.encode)
