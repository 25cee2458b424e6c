"""The device's own table of running requests: one permanent row each, gathered by number.

The device owns the truth about lengths: only K+1 tokens and one length per request cross from one iteration to the next.
Row 0 is padding. Written by the runner (admissions) and by the iteration (tokens, lengths, done flags); read by both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.config import MAX_DRAFTS, PAGE_SIZE, Resolved
from legato.plan import Admit, PageGrant
from legato.runtime.staging import stage_into
from legato.types import MAX_STOP_IDS


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors over M = max_running + 1 rows.

    Attributes:
        tokens: [M, K_max + 1] int64: the newest token, not yet run through the target, then its drafts.
        lengths: [M] int64: the newest token's position, which is how many positions the target's cache holds.
        max_lengths: [M] int64: prompt plus output never exceed it.
        capacity: [M] int64 tokens that the row's pages hold; an iteration never emits past it.
        done: [M] bool: finished; the row emits nothing more.
        stop_ids: [M, MAX_STOP_IDS] int64, -1 where unused.
        num_drafts: [M] int64 drafts that the row verifies at most, whatever is drafted for it.
        drafted: [M] int64 drafts behind the newest token that are worth verifying: those before it stopped being likely.
        temperature, top_p, min_p: [M] float32; top_k: [M] int32; seed: [M] int64.
        page_table: [M, P] int32 physical pages; page 0 (the dummy) where none is granted.
    """

    tokens: Tensor
    lengths: Tensor
    max_lengths: Tensor
    capacity: Tensor
    done: Tensor
    stop_ids: Tensor
    num_drafts: Tensor
    drafted: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    page_table: Tensor

    @classmethod
    def allocate(cls, settings: Resolved) -> Rows:
        """All rows, empty and done."""
        num_rows, device = settings.max_running + 1, settings.device
        num_pages = -(-(settings.context + MAX_DRAFTS) // PAGE_SIZE)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(num_rows, MAX_DRAFTS + 1, dtype=torch.int64),
            lengths=zeros(num_rows, dtype=torch.int64),
            max_lengths=zeros(num_rows, dtype=torch.int64),
            capacity=zeros(num_rows, dtype=torch.int64),
            done=torch.ones(num_rows, dtype=torch.bool, device=device),
            stop_ids=torch.full((num_rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device),
            num_drafts=zeros(num_rows, dtype=torch.int64),
            drafted=zeros(num_rows, dtype=torch.int64),
            temperature=zeros(num_rows, dtype=torch.float32),
            top_k=zeros(num_rows, dtype=torch.int32),
            top_p=torch.ones(num_rows, dtype=torch.float32, device=device),
            min_p=zeros(num_rows, dtype=torch.float32),
            seed=zeros(num_rows, dtype=torch.int64),
            page_table=zeros(num_rows, num_pages, dtype=torch.int32),
        )

    def admit(self, admit: Admit) -> None:
        """Writes a request's settings and pages into its row; nothing of the row's last owner remains.

        Raises:
            ValueError: more stop ids than a row holds.
        """
        if len(admit.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"row {admit.row}: {len(admit.stop_ids)} stop ids, a row holds {MAX_STOP_IDS}")
        row = admit.row
        self.tokens[row].fill_(0)
        self.lengths[row].fill_(0)
        self.max_lengths[row].fill_(admit.max_length)
        self.done[row].fill_(False)
        padding = [-1] * (MAX_STOP_IDS - len(admit.stop_ids))
        stage_into(self.stop_ids[row], [*admit.stop_ids, *padding])
        self.num_drafts[row].fill_(MAX_DRAFTS if admit.num_drafts is None else admit.num_drafts)
        self.drafted[row].fill_(0)
        self.temperature[row].fill_(admit.temperature)
        self.top_k[row].fill_(admit.top_k)
        self.top_p[row].fill_(admit.top_p)
        self.min_p[row].fill_(admit.min_p)
        self.seed[row].fill_(admit.seed)
        self.page_table[row].fill_(0)
        self.grant(PageGrant(row, 0, admit.pages))

    def grant(self, grant: PageGrant) -> None:
        """Appends pages to a row and raises its capacity. Raises `RuntimeError` past the end of the page table."""
        stop = grant.first + len(grant.pages)
        if stop > self.page_table.shape[1]:
            raise RuntimeError(f"row {grant.row}: {stop} pages, its page table holds {self.page_table.shape[1]}")
        stage_into(self.page_table[grant.row, grant.first : stop], grant.pages)
        self.capacity[grant.row].fill_(stop * PAGE_SIZE)
