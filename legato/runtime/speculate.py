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
from legato.model.step import LayerCache, Selection
from legato.ops import accept_rows, advance_rows, extend_rows
from legato.runtime.batch import Batch, Samplers, chain_steps
from legato.runtime.draw import Draw
from legato.runtime.rows import Rows


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target said about B requests.

    Attributes:
        logits: [B, R, W] as the model gives them.
        sampled: [B, R] int64 the target's own tokens.
        accepted: [B] int64 drafts that agreed with them, before any cut.
        counts: [B] int64 tokens emitted: accepted + 1, cut at a stop id, the length limit and the capacity of the row's pages; 0
            for a finished request and for one that waits for a page.
        done: [B] bool, the request has ended, now or before.
        live: [B] bool, it had not ended before.
    """

    logits: Tensor
    sampled: Tensor
    accepted: Tensor
    counts: Tensor
    done: Tensor
    live: Tensor


@dataclass(frozen=True, slots=True)
class Iteration:
    """The models and caches that an iteration runs on; K = `num_drafts`."""

    target: Glm
    mtp: Mtp | None
    caches: Sequence[LayerCache]
    num_drafts: int

    def run(self, batch: Batch, rows: Rows, draw: Draw) -> tuple[Tensor, Verified | None]:
        """One iteration: runs the batch and updates the device table.

        Returns:
            [T, D] post-norm hidden states of the batch's rows, and what the sampling requests emitted (if any sample).
        """
        hidden = self.target.hidden(batch.ids, batch.step, self.caches)
        verified = None if batch.samplers is None else self._verify(hidden, batch.samplers, rows, draw)
        drafts = None
        if self.mtp is not None and self.num_drafts:
            drafts = self._draft(self.mtp, hidden, batch, verified, rows, draw)
        if verified is not None and batch.samplers is not None:
            samplers = batch.samplers
            advance_rows(
                rows.tokens,
                rows.lengths,
                rows.done,
                samplers.rows,
                samplers.base,
                verified.sampled,
                verified.counts,
                verified.done,
                drafts,
            )
        return hidden, verified

    def _verify(self, hidden: Tensor, samplers: Samplers, rows: Rows, draw: Draw) -> Verified:
        num_requests, width = samplers.row_index.shape
        logits = self.target.logits(hidden[samplers.row_index.reshape(-1)])
        sampled = draw.verify(logits, rows, samplers)
        accepted, counts, done, live = accept_rows(
            sampled,
            samplers.drafts,
            samplers.num_drafts,
            samplers.rows,
            samplers.base,
            rows.max_lengths,
            rows.capacity,
            rows.stop_ids,
            rows.done,
        )
        draw.record(samplers, sampled, counts)
        return Verified(logits.view(num_requests, width, -1), sampled, accepted, counts, done, live)

    def _draft(
        self, mtp: Mtp, hidden: Tensor, batch: Batch, verified: Verified | None, rows: Rows, draw: Draw
    ) -> Tensor | None:
        """Draft-extend over the same rows, then the chain: [B, K] drafts for the next iteration."""
        next_ids, step = batch.next_ids, batch.step
        cache = self.caches[-1]
        if batch.samplers is None or verified is None:
            mtp.forward(next_ids, hidden, step, cache, None)
            return None
        samplers = batch.samplers
        next_ids, slots, seed = extend_rows(
            verified.sampled,
            verified.counts,
            samplers.row_index,
            samplers.sampler_of,
            samplers.offset,
            next_ids,
            step.slots,
        )
        extended, selection = mtp.forward(next_ids, hidden, replace(step, slots=slots), cache, None)
        shared = Selection(selection.slots[seed], selection.counts[seed])
        return self._chain(mtp, extended[seed], shared, samplers, verified.counts, rows, draw)

    def _chain(
        self,
        mtp: Mtp,
        hidden: Tensor,
        selection: Selection,
        samplers: Samplers,
        counts: Tensor,
        rows: Rows,
        draw: Draw,
    ) -> Tensor:
        """K drafts: the last accepted row's hidden state gives the first, single-row steps that reuse its selection the rest."""
        steps = chain_steps(samplers, counts, self.num_drafts - 1, rows, self.target.spec)

        def first() -> Tensor:
            return samplers.base + (counts - 1).clamp(min=0) + 2

        drafts = [draw.draft(mtp.logits(hidden), rows, samplers, first, ())]
        for step in steps:
            hidden, _ = mtp.forward(drafts[-1], hidden, step, self.caches[-1], selection)
            following = partial(torch.add, step.positions, 2)
            drafts.append(draw.draft(mtp.logits(hidden), rows, samplers, following, drafts))
        return torch.stack(drafts, dim=1)
