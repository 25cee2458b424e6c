"""The runner: launches plans on a device and hands back flights. It never decides who runs.

Owns the device table, the caches and the models. Built once by the engine's start-up, driven by `engine.loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.config import MAX_DRAFTS, Resolved
from legato.model.glm import Glm
from legato.model.mtp import Mtp
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache
from legato.model.weights import GlmWeights
from legato.ops import linear_draft
from legato.parallel import ALONE, Communicator
from legato.plan import Admit, Emission, Outcome, Plan
from legato.runtime.batch import build_batch
from legato.runtime.cache import CacheLayout
from legato.runtime.controls import ControlTable
from legato.runtime.decode import Decoder
from legato.runtime.draw import CHOICES, ControlledDraw, Draw, PlainDraw, Variant
from legato.runtime.grammar import Gate, Grammars
from legato.runtime.graphs import buckets
from legato.runtime.host import HostPages
from legato.runtime.logprobs import Logprobs, PromptChunk, chunk_logprobs, token_logprobs
from legato.runtime.mailbox import Letter, Mailbox, Ring
from legato.runtime.rows import Rows
from legato.runtime.speculate import Iteration, Verified
from legato.types import ParameterError, SamplingParams, TokenLogprob

_IDS = ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logit_bias", "grammar_after", "reasoning_end")
"""Fields of sampling parameters that hold token ids."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched plan. `outcome()` waits for the device and brings the result to the host."""

    plan: Plan
    sampler_rows: tuple[int, ...]
    drafted: tuple[int, ...]
    letter: Letter | None
    logprobs: Logprobs | None
    wanted_logprobs: tuple[int, ...]
    prompt_logprobs: tuple[PromptChunk, ...] = ()

    def outcome(self) -> Outcome:
        """What came back, row by row."""
        lines = [] if self.letter is None else self.letter.read()[: len(self.sampler_rows)]
        emissions = tuple(
            Emission(
                row=row,
                tokens=line.sampled[: line.count],
                done=line.done,
                accepted=line.accepted,
                drafted=self.drafted[index] if line.live else 0,
                logprobs=self._logprobs(index, line.sampled, line.count),
            )
            for index, (row, line) in enumerate(zip(self.sampler_rows, lines, strict=True))
        )
        return Outcome(self.plan.epoch, emissions, tuple(chunk.values() for chunk in self.prompt_logprobs))

    def _logprobs(self, index: int, tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...] | None:
        top = self.wanted_logprobs[index]
        if self.logprobs is None or top < 0:
            return None
        return self.logprobs.rows(index).entries(tokens[:count], top)


class Runner:
    """One device's share of the engine. `launch` starts an iteration; results wait in the flight it returns."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: GlmWeights,
        settings: Resolved,
        communicator: Communicator = ALONE,
        caches: Sequence[LayerCache] | None = None,
    ) -> None:
        self.spec, self.settings = spec, settings
        self.rows = Rows.allocate(settings)
        target = Glm(spec, weights, communicator)
        head = weights.draft_head or linear_draft.pack(weights.lm_head.dequantize(weights.embed.dtype))
        mtp = None if weights.mtp is None else Mtp(spec, weights.mtp, weights.embed, head, communicator)
        if caches is None:
            caches = CacheLayout(spec, settings.latent, settings.index).allocate(settings.num_pages, settings.device)
        self.iteration = Iteration(target, mtp, caches, settings.num_drafts)
        device = torch.device(settings.device)
        self.decoder = Decoder(self.iteration, self.rows, settings) if device.type == "cuda" else None
        self.mailbox = Mailbox(buckets(settings.max_running)[-1], MAX_DRAFTS + 1, device)
        self.host = HostPages(caches, settings.host_pages) if settings.host_pages else None
        self.grammars: Grammars | None = None
        self._controls = ControlTable(self.rows, spec.vocab_size)
        self._gates: dict[int, Gate] = {}
        self._temperature: dict[int, float] = {}
        self._plain: set[int] = set()
        self._wanted_logprobs: dict[int, int] = {}
        self._wanted_prompt_logprobs: dict[int, int] = {}

    def check(self, params: SamplingParams) -> None:
        """Refuses what would fail in the middle of an iteration, with everyone else's requests in it.

        Raises:
            ParameterError: an id is not in the vocabulary, or the grammar cannot be compiled; the message names the field.
        """
        if params.reasoning_budget is not None and params.reasoning_end is None:
            raise ParameterError("reasoning_budget", "needs reasoning_end, the id of the token that ends reasoning")
        for name in _IDS:
            value = getattr(params, name)
            for token in [value] if isinstance(value, int) else value or ():
                if token >= self.spec.vocab_size:
                    raise ParameterError(name, f"{token} is not in the vocabulary of {self.spec.vocab_size}")
        grammar = params.constraint
        if grammar is not None:
            if self.grammars is None:
                raise ParameterError(grammar.kind, "this engine knows no tokenizer, which a grammar needs")
            self.grammars.check(grammar)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Moves pages, writes admissions and page grants to the device table, and runs the iteration.

        Everything is issued on one stream, so what this iteration writes is what the next one reads.
        """
        if self.host is not None and plan.moves:
            self.host.move(plan.moves)
        for admit in plan.admits:
            self._admit(admit)
        for grant in plan.grants:
            self.rows.grant(grant)
        sampler_rows = tuple(extend.row for extend in plan.extends if extend.next_token is None) + plan.decodes
        drafted, wanted = self._drafted(plan, sampler_rows), tuple(self._wanted_logprobs[row] for row in sampler_rows)
        if self.decoder is not None and not plan.extends:
            return self._decode(self.decoder, plan, drafted, wanted)
        batch = build_batch(plan, self.rows, self.spec, self.settings.num_drafts, self._plain)
        batch = batch.within(self.settings.score_bytes)
        hidden, verified = self.iteration.run(batch, self.rows, self._draw(sampler_rows))
        letter = None if verified is None else self._post(verified)
        logprobs = self._logprobs(verified, wanted)
        return Flight(plan, sampler_rows, drafted, letter, logprobs, wanted, self._prompt_logprobs(plan, hidden))

    def _decode(self, decoder: Decoder, plan: Plan, drafted: tuple[int, ...], wanted: tuple[int, ...]) -> Flight:
        """The steady state on a GPU: as one graph, unless something asks for more than tokens."""
        is_plain = max(wanted) < 0 and not any(self._controls.holds(row) for row in plan.decodes)
        variant = self._variant(plan.decodes)
        bucket = decoder.seats.seat(plan.decodes)
        if is_plain and decoder.has_graph(bucket, variant):
            letter = self.mailbox.post(*decoder.launch(bucket, variant))
            return Flight(plan, plan.decodes, drafted, letter, None, wanted)
        verified = decoder.run(bucket, self._draw(plan.decodes))
        letter = self._post(verified)
        return Flight(plan, plan.decodes, drafted, letter, self._logprobs(verified, wanted), wanted)

    def _post(self, verified: Verified) -> Letter:
        """Of an iteration that is no graph: its letter has a ring of its own."""
        num_requests, num_tokens = verified.sampled.shape
        ring = Ring(num_requests, num_tokens, verified.sampled.device)
        ring.write(verified)
        return self.mailbox.post(*ring.take())

    def _drafted(self, plan: Plan, sampler_rows: Sequence[int]) -> tuple[int, ...]:
        """How many drafts each sampling row verifies."""
        decodes = set(plan.decodes) - self._plain
        return tuple(self.settings.num_drafts if row in decodes else 0 for row in sampler_rows)

    def _admit(self, admit: Admit) -> None:
        row, controls = admit.row, admit.controls
        self.rows.admit(admit)
        self._controls.admit(admit)
        self._gates.pop(row, None)
        if controls is not None and controls.grammar is not None:
            if self.grammars is None:
                raise RuntimeError("a grammar needs the tokenizer's vocabulary: set `grammars` first")
            self._gates[row] = self.grammars.gate(controls.grammar, controls.generated)
        self._temperature[row] = admit.temperature
        self._wanted_logprobs[row] = admit.logprobs
        self._wanted_prompt_logprobs[row] = admit.prompt_logprobs
        (self._plain.add if admit.num_drafts == 0 else self._plain.discard)(row)

    def _variant(self, sampler_rows: Sequence[int]) -> Variant:
        return "greedy" if all(self._temperature[row] == 0.0 for row in sampler_rows) else "general"

    def _draw(self, sampler_rows: Sequence[int]) -> Draw:
        """The cheapest way to choose that is right for all rows that sample."""
        choose = CHOICES[self._variant(sampler_rows)]
        if not any(self._controls.holds(row) for row in sampler_rows):
            return PlainDraw(choose)
        gates = {index: self._gates[row] for index, row in enumerate(sampler_rows) if row in self._gates}
        return ControlledDraw(choose, self._controls, gates)

    def _logprobs(self, verified: Verified | None, wanted: tuple[int, ...]) -> Logprobs | None:
        if verified is None or max(wanted, default=-1) < 0:
            return None
        num_requests, width, vocab = verified.logits.shape  # rows of a padded batch included
        return token_logprobs(verified.logits.view(-1, vocab), verified.sampled.view(-1), max(wanted)).shaped(
            num_requests, width
        )

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor) -> tuple[PromptChunk, ...]:
        """For chunks of prompts whose log-probabilities are wanted; the rows of extends come first, in order."""
        chunks: list[PromptChunk] = []
        first = 0
        for extend in plan.extends:
            top = self._wanted_prompt_logprobs[extend.row]
            if top >= 0:
                rows = hidden[first : first + len(extend.tokens)]
                chunks.append(chunk_logprobs(extend, rows, top, self.iteration.target.logits))
            first += len(extend.tokens)
        return tuple(chunks)
