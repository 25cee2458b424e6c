"""From a plan to the tensors of one iteration: rows in order, where they stand, and which of them sample.

Rows of known tokens (prompts, chunks) come first; then K + 1 rows for every decoding request, whose tokens and position are
read from the device table, never from the host. A batch that only decodes is made on the device alone. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from legato.config import PAGE_SIZE
from legato.model.spec import ModelSpec
from legato.model.step import Prompt, Step
from legato.ops import cache_slots, chain_rows, decode_rows, gather_rows, rope_angles
from legato.plan import Extend, Plan
from legato.runtime.rows import Rows
from legato.runtime.staging import stage_into, staged


@dataclass(frozen=True, slots=True)
class Samplers:
    """The B requests that sample in this iteration: those whose last chunk runs (zero drafts), then the decoding ones (up to K
    drafts).

    R = K + 1 if any request decodes, else 1. "Row" r of a request is its r-th verifying row; a request with fewer than
    R rows repeats its last one, and nothing of the repetition is used.

    Attributes:
        rows: [B] int64 device rows.
        base: [B] int64 position of the request's first verifying row.
        num_drafts: [B] int64.
        drafts: [B, R - 1] int64 tokens to verify.
        row_index: [B, R] int64 index into the T rows of the iteration.
        sampler_of: [T] int64, the request whose verifying row this is, or -1 (its next token is known).
        offset: [T] int64, which verifying row it is.
        are_all: whether the rows of the iteration are the verifying ones, in their order.
    """

    rows: Tensor
    base: Tensor
    num_drafts: Tensor
    drafts: Tensor
    row_index: Tensor
    sampler_of: Tensor
    offset: Tensor
    are_all: bool = False

    def verifying(self, hidden: Tensor) -> Tensor:
        """[B * R, D] hidden states of the verifying rows, of those [T, D] of the iteration."""
        return hidden if self.are_all else hidden[self.row_index.reshape(-1)]

    def following(self) -> Tensor:
        """[B, R] int64 positions of the tokens that the verifying rows choose."""
        return self.base[:, None] + 1 + torch.arange(self.row_index.shape[1], device=self.base.device)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one iteration. `next_ids` [T] int64 holds the following token where it is known (0 elsewhere)."""

    ids: Tensor
    next_ids: Tensor
    step: Step
    samplers: Samplers | None

    def within(self, score_bytes: int) -> Batch:
        """The same, with index scores that keep to a budget."""
        return replace(self, step=replace(self.step, score_bytes=score_bytes))


@dataclass(slots=True)
class _Lists:
    """Columns of the T rows and B samplers while they are collected on the host."""

    ids: list[int]
    next_ids: list[int]
    positions: list[int]
    device_rows: list[int]
    sampler_of: list[int]
    offset: list[int]
    sampler_rows: list[int]
    first: list[int]


def build_batch(plan: Plan, rows: Rows, spec: ModelSpec) -> Batch:
    """Lays out an iteration.

    Args:
        plan: not empty; K is its `num_drafts`.
        rows: the device table; decoding rows read their tokens and lengths from it.
        spec: the model's shapes.
    """
    device = rows.tokens.device
    lists = _known_rows(plan)
    num_known, num_chunk_samplers = len(lists.ids), len(lists.first)
    most = plan.num_drafts
    drafted = [0] * num_chunk_samplers + _offered(plan.decodes, rows, most)
    for row, count in zip(plan.decodes, drafted[num_chunk_samplers:], strict=True):
        lists.sampler_of += [len(lists.first)] * (count + 1)
        lists.first.append(len(lists.offset))
        lists.offset += range(count + 1)
        lists.device_rows += [row] * (count + 1)
        lists.sampler_rows.append(row)

    def column(values: list[int]) -> Tensor:
        return staged(values, torch.int64, device)

    device_rows, offset = column(lists.device_rows), column(lists.offset)
    decoding, depth = device_rows[num_known:], offset[num_known:]
    tokens, decoding_positions = gather_rows(rows.tokens, rows.lengths, decoding, depth)
    ids = torch.cat((column(lists.ids), tokens))
    positions = torch.cat((column(lists.positions), decoding_positions))
    next_ids = torch.cat((column(lists.next_ids), torch.zeros_like(tokens)))
    step = make_step(positions, device_rows, rows, spec)
    if device.type != "cpu":
        step = replace(step, prompt=_prompt(plan, rows))
    if not lists.first:
        return Batch(ids, next_ids, step, None)

    first, sampler_rows, width = column(lists.first), column(lists.sampler_rows), (most if plan.decodes else 0) + 1
    offered = column(drafted)
    if device.type != "cpu":  # there the host does not know how many of them are worth it
        table = torch.minimum(rows.num_drafts, rows.drafted)[sampler_rows]
        offered = torch.minimum(offered, table)
    drafts = rows.tokens[sampler_rows, 1:width].masked_fill(offered[:, None] == 0, 0)
    samplers = Samplers(
        rows=sampler_rows,
        base=positions[first],
        num_drafts=offered,
        drafts=drafts,
        row_index=first[:, None] + torch.minimum(torch.arange(width, device=device), offered[:, None]),
        sampler_of=column(lists.sampler_of),
        offset=offset,
        are_all=not num_known and len(lists.offset) == len(lists.first) * width,
    )
    return Batch(ids, next_ids, step, samplers)


def _prompt(plan: Plan, rows: Rows) -> Prompt | None:
    """The one request of a plan."""
    if plan.decodes or len(plan.extends) != 1:
        return None
    extend = plan.extends[0]
    length = extend.start + len(extend.tokens)
    pages = rows.page_table[extend.row, : -(-length // PAGE_SIZE)]
    offsets = torch.arange(PAGE_SIZE, dtype=torch.int32, device=pages.device)
    return Prompt((pages[:, None] * PAGE_SIZE + offsets).view(-1)[:length].contiguous(), pages.long())


def _offered(decodes: Sequence[int], rows: Rows, most: int) -> list[int]:
    """Drafts that each row verifies: on a CPU, where looking costs nothing, no more than stand in the table for it."""
    if rows.tokens.device.type != "cpu":
        return [most] * len(decodes)
    return [min(most, int(rows.num_drafts[row]), int(rows.drafted[row])) for row in decodes]


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a batch in which B requests verify K drafts each and nothing else runs: the fields of `Samplers` and `Batch` that are
    the same in every iteration, made once."""

    row_index: Tensor
    sampler_of: Tensor
    offset: Tensor
    next_ids: Tensor

    @classmethod
    def of(cls, num_requests: int, num_drafts: int, device: torch.device) -> Layout:
        """For B = `num_requests` and K = `num_drafts`."""
        width = num_drafts + 1
        rows = torch.arange(num_requests * width, device=device)
        return cls(rows.view(num_requests, width), rows // width, rows % width, torch.zeros_like(rows))


def decode_batch(sampler_rows: Tensor, rows: Rows, spec: ModelSpec, layout: Layout) -> Batch:
    """The batch in which B requests verify K drafts each, and nothing else runs.

    Its shapes are a function of B and K, and nothing is read on the host, so that a graph can hold it. A request that verifies
    fewer drafts than K (`rows.num_drafts`, `rows.drafted`) has K + 1 rows all the same; the rest of them repeat its first.

    Args:
        sampler_rows: [B] int64 device rows; row 0, which is padding, any number of times.
        rows: the device table.
        spec: the model's shapes.
        layout: of B and K.
    """
    num_requests, width = layout.row_index.shape
    ids, positions, request, visible, slots, cos, sin, base, offered = decode_rows(
        sampler_rows,
        rows.tokens,
        rows.lengths,
        rows.done,
        rows.num_drafts,
        rows.drafted,
        rows.page_table,
        width,
        spec.rope_theta,
        spec.rope_dim,
    )
    samplers = Samplers(
        rows=sampler_rows,
        base=base,
        num_drafts=offered,
        drafts=ids.view(num_requests, width)[:, 1:],
        row_index=layout.row_index,
        sampler_of=layout.sampler_of,
        offset=layout.offset,
        are_all=True,
    )
    step = Step(positions, request, rows.page_table, visible, slots, cos, sin)
    return Batch(ids, layout.next_ids, step, samplers)


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The end of one prompt, padded to T rows: tensors that last, so that a graph can hold the batch.

    Its rows stand last, so that the last one always samples; in front of them is padding, device row 0 at position 0.

    Attributes:
        inputs: [4, T] int64: tokens, those that follow them (0 behind the last), positions, device rows.
        sampler_of, offset: [T] int64, as in `Samplers`.
        num_drafts: [1] int64, none.
    """

    inputs: Tensor
    sampler_of: Tensor
    offset: Tensor
    num_drafts: Tensor

    @classmethod
    def of(cls, size: int, device: torch.device) -> PromptEnd:
        """For T = `size`; padding alone."""
        inputs = torch.zeros((4, size), dtype=torch.int64, device=device)
        sampler_of = torch.full((size,), -1, dtype=torch.int64, device=device)
        sampler_of[-1] = 0
        return cls(inputs, sampler_of, torch.zeros_like(sampler_of), inputs.new_zeros(1))

    @property
    def size(self) -> int:
        """T."""
        return self.inputs.shape[1]

    def stage(self, extend: Extend) -> None:
        """Writes the last chunk of a prompt, of at most T tokens: one copy, behind what was issued before."""
        count = len(extend.tokens)
        padding = [0] * (self.size - count)
        positions = range(extend.start, extend.start + count)
        columns = extend.tokens, (*extend.tokens[1:], 0), positions, [extend.row] * count
        stage_into(self.inputs.view(-1), [number for column in columns for number in (*padding, *column)])

    def batch(self, rows: Rows, spec: ModelSpec) -> Batch:
        """The batch of what was staged last; nothing is read on the host of a GPU."""
        ids, next_ids, positions, device_rows = self.inputs.unbind(0)
        last = slice(-1, None)
        samplers = Samplers(
            rows=device_rows[last],
            base=positions[last],
            num_drafts=self.num_drafts,
            drafts=self.inputs.new_empty((1, 0)),
            row_index=torch.full_like(self.inputs[:1, :1], self.size - 1),
            sampler_of=self.sampler_of,
            offset=self.offset,
        )
        return Batch(ids, next_ids, make_step(positions, device_rows, rows, spec), samplers)


def make_step(positions: Tensor, device_rows: Tensor, rows: Rows, spec: ModelSpec) -> Step:
    """Where rows stand: slots through the page table, visible lengths, rotary tables.

    Rows of a finished request store nothing. On a CPU the page table is cut to the pages that the longest row can see, which
    changes no result and bounds the score matrix; on a GPU the host does not know them, and lengths on the device say the same.
    """
    num_pages = rows.page_table.shape[1]
    if positions.device.type == "cpu":
        num_pages = min(int(positions.max()) // PAGE_SIZE + 1, num_pages)
    slots = cache_slots(rows.page_table, device_rows, positions).masked_fill(rows.done[device_rows], -1)
    return _step(positions, device_rows, rows.page_table[:, :num_pages], slots, spec)


def chain_steps(samplers: Samplers, counts: Tensor, num_steps: int, rows: Rows, spec: ModelSpec) -> list[Step]:
    """Where the chain's single rows stand, one step after another, behind the first `counts` [B] tokens. They store nothing.

    Their latents would never be read: the selection they reuse holds none of them, and the next draft-extend writes these
    positions itself.
    """
    if not num_steps:
        return []
    positions, request, visible, slots, cos, sin = chain_rows(
        samplers.rows, samplers.base, counts, num_steps, spec.rope_theta, spec.rope_dim
    )
    step, num_requests = Step(positions, request, rows.page_table, visible, slots, cos, sin), counts.shape[0]
    return [step.rows(slice(n * num_requests, (n + 1) * num_requests)) for n in range(num_steps)]


def _step(positions: Tensor, device_rows: Tensor, page_table: Tensor, slots: Tensor, spec: ModelSpec) -> Step:
    cos, sin = rope_angles(positions, spec.rope_theta, spec.rope_dim)
    return Step(
        positions=positions,
        request=device_rows.to(torch.int32),
        page_table=page_table,
        lengths=(positions + 1).to(torch.int32),
        slots=slots,
        cos=cos,
        sin=sin,
    )


def _known_rows(plan: Plan) -> _Lists:
    lists = _Lists([], [], [], [], [], [], [], [])
    for extend in plan.extends:
        count = len(extend.tokens)
        lists.ids += extend.tokens
        lists.positions += range(extend.start, extend.start + count)
        lists.device_rows += [extend.row] * count
        lists.next_ids += extend.tokens[1:]
        lists.next_ids.append(0 if extend.next_token is None else extend.next_token)
        lists.sampler_of += [-1] * count
        lists.offset += [0] * count
        if extend.next_token is None:
            lists.sampler_of[-1] = len(lists.first)
            lists.first.append(len(lists.ids) - 1)
            lists.sampler_rows.append(extend.row)
    return lists
