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
from legato.runtime.prompt_ends import PromptEnds, sizes_of
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
    """Chunks of prompts on their way through the layers, which they have been through up to `depth`: as tensors, or as an end
    padded to `size` rows, which `PromptEnds` holds."""

    extends: tuple[Extend, ...]
    depth: int = 0
    batch: Batch | None = None
    midway: Midway | None = None
    size: int = 0


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
            depth, graphs = self.decoder.split_depth, self.decoder.graphs
            self.ends = PromptEnds(self.iteration, self.rows, sizes_of(settings), settings.score_bytes, depth, graphs)
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
            return self._land(plan, batch, self._hidden(batch))
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
        if layers.start == 0:
            held = self._enter(only)
        elif self._pass is not None and (self._pass.extends, self._pass.depth) == (plan.extends, layers.start):
            held = self._pass
        else:
            raise RuntimeError(f"plan {plan.epoch} goes on at layer {layers.start} with chunks that are not there")
        held = self._through(held, min(layers.stop, self.spec.num_layers))
        self._pass = held if layers.stop < end else None
        return Flight(plan, ()) if layers.stop < end else self._finish(only, held)

    def _enter(self, plan: Plan) -> _Pass:
        """The plan's prompts before the first layer. A single one that ends here, and is short enough, is padded."""
        if self.ends is not None and len(plan.extends) == 1 and plan.extends[0].next_token is None:
            size = self.ends.size_of(len(plan.extends[0].tokens))
            if size is not None:
                self.ends.stage(size, plan.extends[0])
                return _Pass(plan.extends, size=size)
        batch = build_batch(plan, self.rows, self.spec).within(self.settings.score_bytes)
        return _Pass(plan.extends, batch=batch, midway=self.iteration.target.enter(batch.ids))

    def _through(self, held: _Pass, stop: int) -> _Pass:
        """The same behind the layers up to `stop`."""
        if self.ends is not None and held.size:
            self.ends.through(held.size, range(held.depth, stop))
            return replace(held, depth=stop)
        assert held.batch is not None and held.midway is not None, "what is not padded is held as tensors"
        midway = self.iteration.target.through(held.midway, held.batch.step, self.iteration.caches, stop)
        return replace(held, depth=stop, midway=midway)

    def _finish(self, plan: Plan, held: _Pass) -> Flight:
        """What comes behind the last layer. Of a padded end as a graph, or kernel by kernel where something asks for more than
        the token of a plain choice; its rows are the same, so the bits are."""
        if self.ends is None or not held.size:
            assert held.batch is not None and held.midway is not None, "what is not padded is held as tensors"
            return self._land(plan, held.batch, held.midway.normed)
        row = (plan.extends[0].row,)
        if self._is_plain(row) and self._admitted[row[0]].prompt_logprobs < 0:
            letter = self.mailbox.post(self.ends.finish(held.size))
            return Flight(plan, (Part(row, letter, None, (-1,), self._plain_of(row)),))
        padding = held.size - len(plan.extends[0].tokens)
        return self._land(plan, self.ends.batch(held.size), self.ends.hidden(held.size), padding)

    def _hidden(self, batch: Batch) -> Tensor:
        return self.iteration.target.hidden(batch.ids, batch.step, self.iteration.caches)

    def _land(self, plan: Plan, batch: Batch, hidden: Tensor, padding: int = 0) -> Flight:
        """All that comes behind the layers. `padding`: rows in front of those of the plan."""
        sampler_rows = tuple(extend.row for extend in plan.extends if extend.next_token is None) + plan.decodes
        draw = self._draw(sampler_rows, num_drafts=0)
        verified = self.iteration.finish(hidden, batch, self.rows, draw, plan.num_drafts)
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
        return self._land(plan, batch, self._hidden(batch)).parts[0]

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
