"""What changes logits before they are sampled, by device row: penalties, bias, bans, end ids that must wait, and the end of
reasoning that must not.

Owns per-row tensors of vocabulary size, [M, W], that are allocated when the first request asks for them: an engine that never
sees a penalty holds no counts. Knows nothing of drafts beyond the tokens it is told to suppose. Called by the runner and by
`runtime.draw`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.ops import penalize
from legato.plan import Admit, Controls
from legato.runtime.rows import Rows
from legato.runtime.staging import staged, to_device


class ControlTable:
    """Controls of M device rows over a vocabulary of W. Rows without controls pass through unchanged."""

    def __init__(self, rows: Rows, vocab_size: int) -> None:
        self._rows, self._vocab = rows, vocab_size
        self._num_rows, self._device = rows.seed.shape[0], rows.seed.device
        self._min_lengths = torch.zeros(self._num_rows, dtype=torch.int64, device=self._device)
        self._penalties = torch.zeros(3, self._num_rows, device=self._device)
        self._penalties[0] = 1
        self._reasoning_ends = torch.full((self._num_rows,), -1, dtype=torch.int64, device=self._device)
        self._reasoning_lasts = torch.zeros_like(self._min_lengths)
        self._bias: Tensor | None = None
        self._generated: Tensor | None = None
        self._in_prompt: Tensor | None = None
        self._controlled: set[int] = set()
        self._bounded: set[int] = set()

    def admit(self, admit: Admit) -> None:
        """Takes over a row; nothing of its last owner remains."""
        row, controls = admit.row, admit.controls
        if row in self._controlled:
            self._clear(row)
        if controls is not None:
            self._controlled.add(row)
            self._write(row, controls)

    def holds(self, row: int) -> bool:
        """Whether the row's logits must pass through here."""
        return row in self._controlled

    def apply(self, logits: Tensor, device_rows: Tensor, positions: Tensor, supposed: Tensor) -> Tensor:
        """What is to be sampled instead of `logits`.

        Args:
            logits: [T, W], float32 or bfloat16.
            device_rows: [T] int64.
            positions: [T] int64 of the tokens to be chosen.
            supposed: [T, *] int64 tokens that this row supposes were generated in this iteration before it, -1 for none.

        Returns:
            [T, W] float32; -inf where a token is impossible. A row is all -inf if nothing is left.
        """
        out = logits.float()
        if self._generated is not None and self._in_prompt is not None:
            generated = self._generated[device_rows]
            generated.scatter_add_(1, supposed.clamp(min=0), (supposed >= 0).to(torch.int32))
            repetition, frequency, presence = self._penalties[:, device_rows]
            out = penalize(out, generated, self._in_prompt[device_rows], repetition, frequency, presence)
        if self._bias is not None:
            out = out + self._bias[device_rows]
        stop_ids = self._rows.stop_ids[device_rows]
        is_early = (positions < self._min_lengths[device_rows])[:, None] & (stop_ids >= 0)
        held = torch.zeros(stop_ids.shape, device=out.device).masked_fill_(is_early, -torch.inf)
        out = out.scatter_add(1, stop_ids.clamp(min=0), held)
        return self._bound(out, device_rows, positions, supposed) if self._bounded else out

    def _bound(self, logits: Tensor, device_rows: Tensor, positions: Tensor, supposed: Tensor) -> Tensor:
        """Where reasoning has used up its budget, the token that ends it is the only one left. [T, W], as in `apply`."""
        end = self._reasoning_ends[device_rows]
        is_over = (end >= 0) & (positions >= self._reasoning_lasts[device_rows]) & ~(supposed == end[:, None]).any(1)
        only = torch.full_like(logits, -torch.inf).scatter_(1, end.clamp(min=0)[:, None], 0)
        return torch.where(is_over[:, None], only, logits)

    def record(self, device_rows: Tensor, sampled: Tensor, counts: Tensor) -> None:
        """Takes note of what B requests emitted: the first `counts` [B] of `sampled` [B, R]."""
        is_emitted = torch.arange(sampled.shape[1], device=sampled.device) < counts[:, None]
        if self._bounded:
            end = self._reasoning_ends[device_rows]
            has_ended = (is_emitted & (sampled == end[:, None])).any(1)
            self._reasoning_ends[device_rows] = torch.where(has_ended, -1, end)
        if self._generated is None:
            return
        # Row by row through a flat index: a request may emit a token twice in one iteration.
        flat = device_rows[:, None] * self._vocab + sampled
        self._generated.view(-1).scatter_add_(0, flat.reshape(-1), is_emitted.to(torch.int32).reshape(-1))

    def _clear(self, row: int) -> None:
        self._controlled.discard(row)
        self._min_lengths[row].fill_(0)
        self._reasoning_ends[row].fill_(-1)
        self._bounded.discard(row)
        self._penalties[:, row] = staged([1.0, 0.0, 0.0], torch.float32, self._device)
        for tensor in (self._bias, self._generated, self._in_prompt):
            if tensor is not None:
                tensor[row].fill_(0)

    def _write(self, row: int, controls: Controls) -> None:
        self._min_lengths[row].fill_(controls.min_length)
        if controls.reasoning is not None:
            self._bounded.add(row)
            self._reasoning_ends[row].fill_(controls.reasoning.end)
            self._reasoning_lasts[row].fill_(controls.reasoning.last)
        if controls.counts_tokens:
            self._write_counts(row, controls)
        if controls.bias or controls.allowed is not None:
            if self._bias is None:
                self._bias = torch.zeros(self._num_rows, self._vocab, device=self._device)
            if controls.allowed is not None:
                self._bias[row].fill_(-torch.inf)
                self._bias[row].index_fill_(0, self._ids(controls.allowed), 0.0)
            ids = self._ids(tuple(token for token, _ in controls.bias))
            # Added, so that a bias brings no token back that `allowed` leaves out.
            values = staged([value for _, value in controls.bias], torch.float32, self._device)
            self._bias[row].index_add_(0, ids, values)

    def _write_counts(self, row: int, controls: Controls) -> None:
        if self._generated is None or self._in_prompt is None:
            self._generated = torch.zeros(self._num_rows, self._vocab, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._num_rows, self._vocab, dtype=torch.bool, device=self._device)
        penalties = [controls.repetition, controls.frequency, controls.presence]
        self._penalties[:, row] = staged(penalties, torch.float32, self._device)
        self._in_prompt[row].index_fill_(0, self._ids(controls.prompt), True)
        generated = torch.bincount(torch.tensor(controls.generated, dtype=torch.int64), minlength=self._vocab)
        self._generated[row] = to_device(generated.to(torch.int32), self._device)

    def _ids(self, tokens: tuple[int, ...]) -> Tensor:
        return staged(tokens, torch.int64, self._device)
