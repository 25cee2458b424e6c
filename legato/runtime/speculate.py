"""The iteration: verify, accept, draft-extend, chain. The heart of speculative decoding, on tensors only.

Every request samples its *own* token at each verified position, with noise keyed by (seed, position); drafts are accepted as
long as they equal those samples. So what is emitted never depends on the drafts, greedy or not: speculation changes speed,
not one token. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from legato.model.glm import Glm
from legato.model.mtp import Mtp
from legato.model.step import LayerCache, Selection, Step
from legato.ops import accept_rows, advance_rows, extend_rows, likelihood, seed_rows
from legato.runtime.batch import Batch, Samplers, chain_steps
from legato.runtime.draw import Draw, Positions
from legato.runtime.rows import Rows


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the target said about T rows of B requests: its hidden states [T, D] after `model.norm`, the logits [B * R, W] of
    the verifying rows, in their dtype (None: only their best was asked for), and the tokens [B, R] int64 that were chosen."""

    hidden: Tensor
    logits: Tensor | None
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of it for B requests.

    Attributes:
        logits: [B, R, W] as the model gives them; `None` where only the best tokens were asked for.
        sampled: [B, R] int64 the target's own tokens.
        accepted: [B] int64 drafts that agreed with them, before any cut.
        offered: [B] int64 drafts that were verified.
        counts: [B] int64 tokens emitted: accepted + 1, cut at a stop id, the length limit and the capacity of the row's pages; 0
            for a finished request and for one that waits for a page.
        done: [B] bool, the request has ended, now or before.
        live: [B] bool, it had not ended before.
        drafts: [B, K] int64 for the next iteration; K = 0 without a draft layer.
    """

    logits: Tensor | None
    sampled: Tensor
    accepted: Tensor
    offered: Tensor
    counts: Tensor
    done: Tensor
    live: Tensor
    drafts: Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts [B, K] int64 and, where it is asked for, how likely each is behind those before it, [B, K] float32."""

    tokens: Tensor
    likely: Tensor | None


@dataclass(frozen=True, slots=True)
class Drafting:
    """Whom drafts are for: B requests that have emitted `counts` [B] tokens in this iteration."""

    samplers: Samplers
    counts: Tensor
    rows: Rows
    draw: Draw

    def first(self) -> Tensor:
        """[B] int64 positions of the first drafts."""
        return self.samplers.base + (self.counts - 1).clamp(min=0) + 2


@dataclass(frozen=True, slots=True)
class Iteration:
    """The models and caches that an iteration runs on. `threshold`: drafts that are less likely than this, together with those
    before them, are not verified; 0: all are."""

    target: Glm
    mtp: Mtp | None
    caches: Sequence[LayerCache]
    threshold: float = 0.0

    def run(self, batch: Batch, rows: Rows, draw: Draw, num_drafts: int) -> tuple[Tensor, Verified | None]:
        """One iteration: runs the batch, makes `num_drafts` = K drafts for the next one and updates the device table.

        Returns:
            [T, D] post-norm hidden states of the batch's rows, and what the sampling requests emitted (if any sample).
        """
        hidden = self.target.hidden(batch.ids, batch.step, self.caches)
        return hidden, self.finish(hidden, batch, rows, draw, num_drafts)

    def finish(self, hidden: Tensor, batch: Batch, rows: Rows, draw: Draw, num_drafts: int) -> Verified | None:
        """Everything behind the target's layers, for the hidden states [T, D] of the batch's rows."""
        if batch.samplers is None:
            if self.mtp is not None and num_drafts:
                self.mtp.forward(batch.next_ids, hidden, batch.step, self.caches[-1], None)
            return None
        said = _said(self.target, batch.samplers.verifying(hidden), draw)
        logits = None if draw.wants_best else said
        sampled = Sampled(hidden, logits, draw.verify(said, rows, batch.samplers))
        return self.settle(sampled, batch, rows, draw, num_drafts)

    def logits(self, hidden: Tensor, samplers: Samplers) -> Tensor:
        """[B * R, W] logits of the verifying rows, in the dtype of the hidden states."""
        return self.target.logits(samplers.verifying(hidden))

    def settle(self, sampled: Sampled, batch: Batch, rows: Rows, draw: Draw, num_drafts: int) -> Verified:
        """Everything behind the choice of tokens: accept, draft, advance the device table."""
        samplers = batch.samplers
        assert samplers is not None, "tokens were chosen for someone"
        accepted, counts, done, live = accept_rows(
            sampled.tokens,
            samplers.drafts,
            samplers.num_drafts,
            samplers.rows,
            samplers.base,
            rows.max_lengths,
            rows.capacity,
            rows.stop_ids,
            rows.done,
        )
        draw.record(samplers, sampled.tokens, counts)
        drafted: Drafted | None = None
        if self.mtp is not None and num_drafts:
            drafted = self._draft(self.mtp, sampled, batch, Drafting(samplers, counts, rows, draw), num_drafts)
        advance_rows(
            rows.tokens,
            rows.lengths,
            rows.done,
            rows.drafted,
            samplers.rows,
            samplers.base,
            sampled.tokens,
            counts,
            done,
            None if drafted is None else drafted.tokens,
            None if drafted is None else drafted.likely,
            self.threshold,
        )
        num_requests, width = sampled.tokens.shape
        logits = None if sampled.logits is None else sampled.logits.view(num_requests, width, -1)
        none = samplers.rows.new_empty((num_requests, 0))
        drafts = none if drafted is None else drafted.tokens
        return Verified(logits, sampled.tokens, accepted, samplers.num_drafts, counts, done, live, drafts)

    def _draft(self, mtp: Mtp, sampled: Sampled, batch: Batch, drafting: Drafting, num_drafts: int) -> Drafted:
        """Draft-extend over the same rows, then the chain: [B, K] drafts for the next iteration."""
        step, samplers, counts = batch.step, drafting.samplers, drafting.counts
        next_ids, slots, seed = extend_rows(
            sampled.tokens,
            counts,
            samplers.row_index,
            samplers.sampler_of,
            samplers.offset,
            batch.next_ids,
            step.slots,
        )
        extended, selection = mtp.forward(next_ids, sampled.hidden, replace(step, slots=slots), self.caches[-1], None)
        first, chosen, count = seed_rows(extended, selection.slots, selection.counts, seed)
        steps = chain_steps(samplers, counts, num_drafts - 1, drafting.rows, self.target.spec)
        return self._chain(mtp, first, Selection(chosen, count), steps, drafting)

    def _chain(
        self, mtp: Mtp, hidden: Tensor, selection: Selection, steps: Sequence[Step], drafting: Drafting
    ) -> Drafted:
        """The last accepted row's hidden state [B, D] gives the first draft, single-row steps with its selection the rest."""
        drafts: list[Tensor] = []
        likely: list[Tensor] = []

        def choose(positions: Positions) -> None:
            said = _said(mtp, hidden, drafting.draw)
            drafts.append(drafting.draw.draft(said, drafting.rows, drafting.samplers, positions, drafts))
            if self.threshold > 0:
                likely.append(likelihood(said, drafts[-1]))

        choose(drafting.first)
        for step in steps:
            hidden, _ = mtp.forward(drafts[-1], hidden, step, self.caches[-1], selection)
            choose(partial(torch.add, step.positions, 2))
        return Drafted(torch.stack(drafts, dim=1), torch.stack(likely, dim=1) if likely else None)


def _said(model: Glm | Mtp, hidden: Tensor, draw: Draw) -> Tensor:
    """What a head says of rows, as `draw` wants it."""
    return model.best(hidden) if draw.wants_best else model.logits(hidden)
