"""The runner: launches plans on a device and hands back flights. It never decides who runs.

Owns the device table, the caches and the models. Built once by the engine's start-up, driven by `engine.loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.config import MAX_DRAFTS, Resolved
from legato.model.glm import Glm, Midway
from legato.model.mtp import Mtp
from legato.model.spec import ModelSpec
from legato.model.step import LayerCache
from legato.model.weights import GlmWeights
from legato.ops import linear_draft
from legato.parallel import ALONE, Communicator
from legato.parallel.communicators import SingleRank
from legato.parallel.loopback import LoopBack
from legato.plan import Admit, Emission, Extend, Outcome, Plan
from legato.runtime.batch import Batch, build_batch
from legato.runtime.cache import CacheLayout
from legato.runtime.controls import ControlTable
from legato.runtime.decode import Decoder
from legato.runtime.draw import CHOICES, ControlledDraw, Draw, PlainDraw, Variant
from legato.runtime.grammar import Gate, Grammars
from legato.runtime.graphs import buckets
from legato.runtime.host import HostPages
from legato.runtime.logprobs import Logprobs, PromptChunk, chunk_logprobs, token_logprobs
from legato.runtime.mailbox import Letter, Line, Mailbox, Ring
from legato.runtime.prompt_ends import PromptEnds
from legato.runtime.rows import Rows
from legato.runtime.speculate import Iteration
from legato.types import ParameterError, SamplingParams, TokenLogprob

_IDS = ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "logit_bias", "grammar_after", "reasoning_end")
"""Fields of sampling parameters that hold token ids."""


@dataclass(frozen=True, slots=True)
class Part:
    """What some device rows sample in one iteration: a letter with a line for each, and what else is wanted of them. `plain`:
    rows that asked for no drafts."""

    rows: tuple[int, ...]
    letter: Letter
    logprobs: Logprobs | None
    wanted: tuple[int, ...]
    plain: frozenset[int]

    def emissions(self) -> list[Emission]:
        """Row by row, when the letter has come."""
        lines = self.letter.read()[: len(self.rows)]
        return [
            Emission(
                row=row,
                tokens=line.sampled[: line.count],
                done=line.done,
                accepted=line.accepted,
                drafted=line.offered if line.live else 0,
                logprobs=self._logprobs(index, line),
                is_plain=row in self.plain,
            )
            for index, (row, line) in enumerate(zip(self.rows, lines, strict=True))
        ]

    def _logprobs(self, index: int, line: Line) -> tuple[TokenLogprob, ...] | None:
        top = self.wanted[index]
        if self.logprobs is None or top < 0:
            return None
        return self.logprobs.rows(index).entries(line.sampled[: line.count], top)


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched plan. `outcome()` waits for the device and brings the result to the host."""

    plan: Plan
    parts: tuple[Part, ...]
    prompt_logprobs: tuple[PromptChunk, ...] = ()

    def outcome(self) -> Outcome:
        """What came back, row by row."""
        emissions = tuple(emission for part in self.parts for emission in part.emissions())
        prompt_logprobs = tuple(chunk.values() for chunk in self.prompt_logprobs)
        took = [part.letter.seconds() for part in self.parts]
        known = [seconds for seconds in took if seconds is not None]
        seconds = sum(known) if known and len(known) == len(took) else None
        return Outcome(self.plan.epoch, emissions, prompt_logprobs, seconds)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Chunks of prompts on their way through the layers."""

    extends: tuple[Extend, ...]
    batch: Batch
    midway: Midway


@dataclass(slots=True)
class _Gated:
    """A device row's grammar. On a GPU it follows behind: `unread` is the letter, and the row's line in it, that it has not been
    told of, `drafts` stand behind what it has been told."""

    gate: Gate
    unread: tuple[Letter, int] | None = None
    drafts: tuple[int, ...] = ()

    def catch_up(self) -> tuple[int, ...]:
        """Moves the grammar to where the last letter says the text stands; returns the drafts that stand behind it."""
        if self.unread is not None:
            (letter, index), self.unread = self.unread, None
            line = letter.read()[index]
            self.gate.accept(line.sampled[: line.count])
            if line.count:
                self.drafts = line.drafts
        return self.drafts


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
        self.iteration = Iteration(target, mtp, caches, settings.draft_threshold)
        device = torch.device(settings.device)
        self.decoder: Decoder | None = None
        self.ends: PromptEnds | None = None
        if device.type == "cuda":
            self.decoder = Decoder(self.iteration, self.rows, settings)
            if isinstance(communicator, SingleRank | LoopBack):  # such graphs have not run among ranks yet
                depth, graphs = self.decoder.split_depth, self.decoder.graphs
                self.ends = PromptEnds(self.iteration, self.rows, settings, depth, graphs)
        self.mailbox = Mailbox(buckets(settings.max_running)[-1], 2 * MAX_DRAFTS + 1, device)
        self.host = HostPages(caches, settings.host_pages) if settings.host_pages else None
        self.grammars: Grammars | None = None
        self._controls = ControlTable(self.rows, spec.vocab_size)
        self._admitted: dict[int, Admit] = {}
        self._gated: dict[int, _Gated] = {}
        self._pass: _Pass | None = None

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
        if plan.layers is None or plan.layers.start == 0:
            self._pass = None  # if there was one, no plan goes on with it
        if self.host is not None and plan.moves:
            self.host.move(plan.moves)
        for admit in plan.admits:
            self._admit(admit)
        for grant in plan.grants:
            self.rows.grant(grant)
        if not plan.extends and not plan.decodes:
            return Flight(plan, ())
        if self.decoder is None and plan.layers is None:
            batch = build_batch(plan, self.rows, self.spec).within(self.settings.score_bytes)
            return self._land(plan, batch, self.iteration.target.enter(batch.ids))
        flight = self._extend(plan) if plan.extends else Flight(plan, ())
        if not plan.decodes:
            return flight
        only = replace(plan, extends=())
        part = self._decode_eagerly(only) if self.decoder is None else self._decode(self.decoder, only)
        return replace(flight, parts=(*flight.parts, part))

    def _extend(self, plan: Plan) -> Flight:
        """The plan's prompts alone, through as many layers as it says. Raises RuntimeError if they are not where it says."""
        end = self.spec.num_layers + 1
        layers = range(end) if plan.layers is None else plan.layers
        only = replace(plan, decodes=())
        if self.ends is not None and (size := self._size_of_end(self.ends, plan)) is not None:
            return self._end(self.ends, only, size)
        if layers.start == 0:
            batch = build_batch(only, self.rows, self.spec).within(self.settings.score_bytes)
            held = _Pass(plan.extends, batch, self.iteration.target.enter(batch.ids))
        elif self._pass is not None and (self._pass.extends, self._pass.midway.depth) == (plan.extends, layers.start):
            held = self._pass
        else:
            raise RuntimeError(f"plan {plan.epoch} goes on at layer {layers.start} with chunks that are not there")
        self._pass = None
        if layers.stop == end:
            return self._land(only, held.batch, held.midway)
        midway = self.iteration.target.through(held.midway, held.batch.step, self.iteration.caches, layers.stop)
        self._pass = replace(held, midway=midway)
        return Flight(plan, ())

    def _size_of_end(self, ends: PromptEnds, plan: Plan) -> int | None:
        """To how many rows the plan's prompts are padded: those of a single one that ends here, in a pass that is not cut."""
        if plan.layers is not None or len(plan.extends) != 1 or plan.extends[0].next_token is not None:
            return None
        return ends.size_of(len(plan.extends[0].tokens))

    def _end(self, ends: PromptEnds, plan: Plan, size: int) -> Flight:
        """The end of one prompt, padded: one graph, or kernel by kernel where something asks for more than the token of
        a plain choice. Both run the same rows, padding included, so the bits are the same."""
        (extend,) = plan.extends
        row = (extend.row,)
        ends.stage(size, extend)
        if self._is_plain(row) and self._admitted[extend.row].prompt_logprobs < 0:
            letter = self.mailbox.post(ends.launch(size))
            return Flight(plan, (Part(row, letter, None, (-1,), self._plain_of(row)),))
        batch = ends.batch(size)
        return self._land(plan, batch, self.iteration.target.enter(batch.ids), size - len(extend.tokens))

    def _land(self, plan: Plan, batch: Batch, midway: Midway, padding: int = 0) -> Flight:
        """The rest of the layers, and all that comes behind them. `padding`: rows in front of those of the plan."""
        iteration = self.iteration
        hidden = iteration.target.through(midway, batch.step, iteration.caches, self.spec.num_layers).normed
        sampler_rows = tuple(extend.row for extend in plan.extends if extend.next_token is None) + plan.decodes
        draw = self._draw(sampler_rows, num_drafts=0)
        verified = iteration.finish(hidden, batch, self.rows, draw, plan.num_drafts)
        prompt_logprobs = self._prompt_logprobs(plan, hidden[padding:])
        if verified is None:
            return Flight(plan, (), prompt_logprobs)
        (num_requests, width), num_drafts = verified.sampled.shape, verified.drafts.shape[1]
        ring = Ring(num_requests, width, num_drafts, verified.sampled.device)
        ring.write(verified)
        part = self._part(sampler_rows, self.mailbox.post(ring.take()), verified.logits, verified.sampled)
        return Flight(plan, (part,), prompt_logprobs)

    def _decode_eagerly(self, plan: Plan) -> Part:
        batch = build_batch(plan, self.rows, self.spec).within(self.settings.score_bytes)
        return self._land(plan, batch, self.iteration.target.enter(batch.ids)).parts[0]

    def _decode(self, decoder: Decoder, plan: Plan) -> Part:
        """The steady state on a GPU: one graph, or two where something asks for more than the tokens of a plain choice."""
        rows, variant = plan.decodes, self._variant(plan.decodes)
        bucket = decoder.seats.seat(rows)
        if self._is_plain(rows):
            letter = self.mailbox.post(decoder.launch(decoder.key(bucket, variant, plan.num_drafts)))
            return Part(rows, letter, None, (-1,) * len(rows), self._plain_of(rows))
        key, begun = decoder.begin(len(rows))
        draw = self._draw(rows, key.num_drafts)  # reads what the iteration before has brought, while this one runs
        tokens = draw.verify(begun.logits, self.rows, begun.samplers)
        begun.tokens.copy_(tokens)
        done = decoder.complete(key, begun)
        draw.record(begun.samplers, tokens, done.verified.counts)
        return self._part(rows, self.mailbox.post(done.written), done.verified.logits, tokens)

    def _part(self, rows: tuple[int, ...], letter: Letter, logits: Tensor | None, sampled: Tensor) -> Part:
        if self.decoder is not None:  # elsewhere grammars are moved as tokens are chosen
            for index, row in enumerate(rows):
                if row in self._gated:
                    self._gated[row].unread = (letter, index)
        wanted = tuple(self._admitted[row].logprobs for row in rows)
        return Part(rows, letter, self._logprobs(logits, sampled, wanted), wanted, self._plain_of(rows))

    def _is_plain(self, rows: Sequence[int]) -> bool:
        """Whether the token of a plain choice is all that rows want."""
        return all(self._admitted[row].logprobs < 0 and not self._controls.holds(row) for row in rows)

    def _plain_of(self, rows: tuple[int, ...]) -> frozenset[int]:
        return frozenset(row for row in rows if self._admitted[row].num_drafts == 0)

    def _admit(self, admit: Admit) -> None:
        row, controls = admit.row, admit.controls
        self.rows.admit(admit)
        self._controls.admit(admit)
        self._admitted[row] = admit
        self._gated.pop(row, None)
        if controls is not None and controls.grammar is not None:
            if self.grammars is None:
                raise RuntimeError("a grammar needs the tokenizer's vocabulary: set `grammars` first")
            self._gated[row] = _Gated(self.grammars.gate(controls.grammar, controls.generated))

    def _variant(self, sampler_rows: Sequence[int]) -> Variant:
        return "greedy" if all(self._admitted[row].temperature == 0.0 for row in sampler_rows) else "general"

    def _draw(self, sampler_rows: Sequence[int], num_drafts: int) -> Draw:
        """The cheapest way to choose that is right for all rows that sample; `num_drafts` of theirs are verified at most."""
        choose = CHOICES[self._variant(sampler_rows)]
        if not any(self._controls.holds(row) for row in sampler_rows):
            return PlainDraw(choose)
        gated = {index: self._gated[row] for index, row in enumerate(sampler_rows) if row in self._gated}
        if self.decoder is None:
            return ControlledDraw(choose, self._controls, {index: one.gate for index, one in gated.items()})
        foreseen: dict[int, bytes] = {}
        for index, one in gated.items():
            drafts = one.catch_up()[:num_drafts]
            first = index * (num_drafts + 1)
            foreseen |= {first + offset: mask for offset, mask in enumerate(one.gate.masks(drafts))}
        return ControlledDraw(choose, self._controls, {}, foreseen)

    def _logprobs(self, logits: Tensor | None, sampled: Tensor, wanted: tuple[int, ...]) -> Logprobs | None:
        if max(wanted, default=-1) < 0:
            return None
        assert logits is not None, "only graphs of whole iterations leave none, and none of their requests wants any"
        num_requests, width, vocab = logits.shape  # rows of a padded batch included
        return token_logprobs(logits.view(-1, vocab), sampled.view(-1), max(wanted)).shaped(num_requests, width)

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor) -> tuple[PromptChunk, ...]:
        """For chunks of prompts whose log-probabilities are wanted; the rows of extends come first, in order."""
        chunks: list[PromptChunk] = []
        first = 0
        for extend in plan.extends:
            top = self._admitted[extend.row].prompt_logprobs
            if top >= 0:
                rows = hidden[first : first + len(extend.tokens)]
                chunks.append(chunk_logprobs(extend, rows, top, self.iteration.target.logits))
            first += len(extend.tokens)
        return tuple(chunks)
