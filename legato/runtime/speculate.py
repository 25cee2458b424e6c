"""The iteration: verify, accept, draft-extend, chain. The heart of speculative decoding, on tensors only.

Every request samples its *own* token at each verified position, with noise keyed by (seed, position); drafts are accepted as
long as they equal those samples. So what is emitted never depends on the drafts, greedy or not: speculation changes speed,
not one token. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.model.glm import Glm
from legato.model.mtp import Mtp
from legato.model.step import LayerCache, Selection
from legato.ops import advance_rows, verify
from legato.runtime.batch import Batch, Samplers, chain_steps
from legato.runtime.draw import Draw
from legato.runtime.rows import Rows


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target said about B requests.

    Attributes:
        logits: [B, R, W] float32.
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
        offsets = torch.arange(width, device=hidden.device)
        positions = samplers.base[:, None] + 1 + offsets
        sampled = draw.verify(logits, rows, samplers, positions)
        accepted = verify(sampled, samplers.drafts, samplers.num_drafts)
        limits = rows.max_lengths[samplers.rows] - samplers.base - 1
        room = rows.capacity[samplers.rows] - samplers.base
        counts, ended = cut(sampled, accepted + 1, rows.stop_ids[samplers.rows], limits, room)
        live = ~rows.done[samplers.rows]
        counts = torch.where(live, counts, torch.zeros_like(counts))
        draw.record(samplers, sampled, counts)
        return Verified(
            logits=logits.view(num_requests, width, -1),
            sampled=sampled,
            accepted=accepted,
            counts=counts,
            done=ended | ~live,
            live=live,
        )

    def _draft(
        self, mtp: Mtp, hidden: Tensor, batch: Batch, verified: Verified | None, rows: Rows, draw: Draw
    ) -> Tensor | None:
        """Draft-extend over the same rows, then the chain: [B, K] drafts for the next iteration."""
        next_ids, step = batch.next_ids, batch.step
        cache = self.caches[-1]
        if batch.samplers is None or verified is None:
            mtp.forward(next_ids, hidden, step, cache, None)
            return None
        sampler_of, offset = batch.samplers.sampler_of, batch.samplers.offset
        is_verifying, request = sampler_of >= 0, sampler_of.clamp(min=0)
        next_ids = torch.where(is_verifying, verified.sampled[request, offset], next_ids)
        is_rejected = is_verifying & (offset >= verified.counts[request])
        step = replace(step, slots=torch.where(is_rejected, torch.full_like(step.slots, -1), step.slots))
        extended, selection = mtp.forward(next_ids, hidden, step, cache, None)

        last = (verified.counts - 1).clamp(min=0)
        seed = batch.samplers.row_index.gather(1, last[:, None])[:, 0]
        shared = Selection(selection.slots[seed], selection.counts[seed])
        return self._chain(mtp, extended[seed], shared, batch.samplers, last, rows, draw)

    def _chain(
        self,
        mtp: Mtp,
        hidden: Tensor,
        selection: Selection,
        samplers: Samplers,
        last: Tensor,
        rows: Rows,
        draw: Draw,
    ) -> Tensor:
        """K drafts: the last accepted row's hidden state gives the first, single-row steps that reuse its selection the rest."""
        seed_position = samplers.base + last
        token = draw.draft(mtp.logits(hidden), rows, samplers, seed_position + 2, ())
        drafts = [token]
        offsets = torch.arange(1, self.num_drafts, device=hidden.device)
        for step in chain_steps(seed_position + offsets[:, None], samplers.rows, rows, self.target.spec):
            hidden, _ = mtp.forward(token, hidden, step, self.caches[-1], selection)
            token = draw.draft(mtp.logits(hidden), rows, samplers, step.positions + 2, drafts)
            drafts.append(token)
        return torch.stack(drafts, dim=1)


def cut(sampled: Tensor, counts: Tensor, stop_ids: Tensor, limits: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts what was accepted at the first stop id, at the length limit and at the end of the row's pages, whichever comes first.

    The end of the pages ends no request: it goes on, with the same tokens, once it has been granted a page.

    Args:
        sampled: [B, R] int64 tokens.
        counts: [B] int64, how many of them were accepted.
        stop_ids: [B, *] int64, -1 where unused.
        limits: [B] int64 tokens that may still be emitted (0 or less: none).
        room: [B] int64 positions that the row's pages can still take (0 or less: none).

    Returns:
        [B] int64 counts after the cut, and [B] bool whether the request ends here.
    """
    width = sampled.shape[1]
    offsets = torch.arange(width, device=sampled.device)
    is_stop = (sampled[:, :, None] == stop_ids[:, None, :]).any(-1) & (offsets < counts[:, None])
    first_stop = torch.where(is_stop, offsets, torch.full_like(offsets, width)).amin(1)
    stopped = torch.minimum(counts, first_stop + 1)
    limited = torch.minimum(stopped, torch.minimum(limits, room).clamp(min=0))
    return limited, (limited >= limits) | ((first_stop < width) & (limited == first_stop + 1))
