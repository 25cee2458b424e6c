"""An engine that plays a script: which tokens come, in which steps, how fast, and what goes wrong. For timing and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from legato.config import PAGE_SIZE
from legato.engine.messages import Counters, EngineInfo, Progress, PromptLogprobs, Report
from legato.server.engine.client import EngineFailed, GenerationRequest, RequestRefused
from legato.types import Stats, TokenLogprob

Script = Callable[[GenerationRequest], Iterable[Sequence[int]]]


class FakeEngine:
    """Steps of `script`, `step_s` apart. A step that ends with an end id, or `max_tokens`, ends the request.

    Attributes:
        seen: every request, in order.
        open: ids of those that run.
        left: ids of those that were left before their end, or aborted.
        fault: raised instead of the first step, or before step `fault_at`.
        says_taken: whether it tells at once that it has taken a request, as the engine does where no iteration is in its way.
        prefill_chunk: tokens of a prompt whose log-probabilities come in one step; those of the last chunk come with the first
            step of the script, earlier ones in steps without tokens.
    """

    def __init__(self, script: Script, *, step_s: float = 0.0, context: int = 512, vocab_size: int = 8192) -> None:
        self.script, self.step_s = script, step_s
        self.info = EngineInfo(
            model="small", folder="", device="cpu", context=context, cache_tokens=4096, num_drafts=5, max_running=16,
            vocab_size=vocab_size, load_seconds=0.1, latent="float32", index="fp8",
        )  # fmt: skip
        self.state = "ready"
        self.failure: str | None = None
        self.last_report = Report(Stats(), Counters())
        self.seen: list[GenerationRequest] = []
        self.open: set[str] = set()
        self.left: list[str] = []
        self.fault: Exception | None = None
        self.fault_at = 0
        self.prefill_chunk = 10**9
        self.says_taken = True
        self.flushed = 0
        self._aborts: set[str] = set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress]:
        assert request.id is not None
        if self.state == "failed":
            raise EngineFailed("the engine failed in /some/secret/path")
        if self.state == "draining":
            raise RequestRefused("draining", "", "the engine is about to stop")
        asked = request.params.max_tokens
        most = min(self.info.context, -(-self.info.cache_tokens // PAGE_SIZE) * PAGE_SIZE + 1)
        if asked is not None and len(request.prompt) + asked > most:
            raise RequestRefused("never_fits", "max_tokens", f"there is room for {most}, asked for {asked}")
        self.seen.append(request)
        self.open.add(request.id)
        is_over = False
        try:
            if self.says_taken:
                yield Progress(request.id, ())
            for early in self._prompt_chunks(request)[:-1]:
                await asyncio.sleep(self.step_s)
                yield Progress(request.id, (), None, prompt_logprobs=early)
            emitted, limit = 0, request.params.max_tokens or 10**9
            for number, step in enumerate(self.script(request)):
                await asyncio.sleep(self.step_s)
                if self.fault is not None and number == self.fault_at:
                    is_over = True
                    raise self.fault
                tokens = tuple(step[: limit - emitted])
                emitted += len(tokens)
                reason = "length" if emitted >= limit else None
                if tokens and tokens[-1] in request.stop_ids:
                    reason = "stop"
                if request.id in self._aborts:
                    tokens, reason = (), "abort"
                is_over = reason is not None
                yield self._progress(request, number, tokens, reason)
                if is_over:
                    return
            is_over = True
            yield Progress(request.id, (), "length")
        finally:
            self.open.discard(request.id)
            self._aborts.discard(request.id)
            if not is_over:
                self.left.append(request.id)

    def _progress(
        self, request: GenerationRequest, number: int, tokens: tuple[int, ...], reason: str | None
    ) -> Progress:
        top = request.params.logprobs
        logprobs = None if top is None else tuple(entry(token, top) for token in tokens)
        chunks = self._prompt_chunks(request)
        prompt = chunks[-1] if chunks and number == 0 else None
        drafted = 5 if number else 0
        return Progress(
            request.id, tokens, reason, max(0, len(tokens) - 1) if number else 0, drafted, 0, logprobs, prompt
        )

    def _prompt_chunks(self, request: GenerationRequest) -> list[PromptLogprobs]:
        """As the engine sends them: one token has none, and nothing is sent."""
        top, prompt = request.params.prompt_logprobs, request.prompt
        if top is None:
            return []
        starts = range(0, len(prompt), self.prefill_chunk)
        ranges = [(max(1, start), min(start + self.prefill_chunk, len(prompt))) for start in starts]
        return [
            PromptLogprobs(first, tuple(entry(token, top) for token in prompt[first:end]))
            for first, end in ranges
            if first < end
        ]

    async def abort(self, id: str | None = None) -> None:
        self._aborts |= self.open if id is None else self.open & {id}

    async def flush_cache(self) -> int:
        self.flushed += 1
        return 7

    async def reset_stats(self) -> None:
        pass

    async def report(self) -> Report:
        return self.last_report


def entry(token: int, num_top: int) -> TokenLogprob:
    """A log-probability that depends on the token alone."""
    return TokenLogprob(token, -token / 1000, tuple((rival, -0.5 - rival) for rival in range(num_top)))
