# pyright: basic
"""The bookkeeping of an iteration on Hopper: `sm90.cu`, one launch for each op.

Owns the launches. Knows no model. Imported by `bind` only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.pointwise import rope_frequencies
from legato.ops.rows import (
    LETTER_EXTRA,
    accept_rows,
    advance_rows,
    chain_rows,
    decode_rows,
    extend_rows,
    seed_rows,
    write_letter,
)
from legato.ops.strides import PIECE_BYTES, is_dense

_SOURCE = Source(Path(__file__).with_name("sm90.cu"))
_DECODE, _CHAIN, _ACCEPT, _EXTEND, _SEED, _ADVANCE, _LETTER = (
    Kernel(_SOURCE, name)
    for name in ("decode_rows", "chain_rows", "accept_rows", "extend_rows", "seed_rows", "advance_rows", "write_letter")
)
_ONE_BLOCK = Launch(grid=(1,), block=(256,), programmatic=True)


def _each(rows: int) -> Launch:
    return Launch(grid=(rows,), block=(32,), programmatic=True)


def _spread(threads: int) -> Launch:
    return Launch(grid=(-(-threads // 128),), block=(128,), programmatic=True)


def _checked(op_name: str, dtype: torch.dtype = torch.int64, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or not tensor.is_contiguous():
            expected = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"{op_name}: {name} is {tensor.dtype}, strides {tensor.stride()}; expected {expected}, contiguous"
            )


@decode_rows.on("sm90")
def decode_rows_sm90(
    places: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    done: Tensor,
    num_drafts: Tensor,
    drafted: Tensor,
    page_table: Tensor,
    width: int,
    theta: float,
    rope_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One launch; the table's numbers int64, its flags bool, all contiguous."""
    _checked("decode_rows", places=places, tokens=tokens, lengths=lengths, num_drafts=num_drafts, drafted=drafted)
    _checked("decode_rows", torch.bool, done=done)
    page_table = page_table.to(torch.int32).contiguous()
    rows = places.shape[0] * width
    ids, positions = (torch.empty(rows, dtype=torch.int64, device=places.device) for _ in range(2))
    request, visible, slots = (torch.empty(rows, dtype=torch.int32, device=places.device) for _ in range(3))
    cos, sin = (torch.empty(rows, rope_dim // 2, dtype=torch.float32, device=places.device) for _ in range(2))
    frequencies = rope_frequencies(places.device, theta, rope_dim)
    base, offered = torch.empty_like(places), torch.empty_like(places)
    made = ids, positions, request, visible, slots, cos, sin, base, offered
    sizes = width, tokens.shape[1], page_table.shape[1], rope_dim // 2
    _DECODE(_each(rows), places, tokens, lengths, done, num_drafts, drafted, page_table, frequencies, *made, *sizes)
    return made


@chain_rows.on("sm90")
def chain_rows_sm90(
    places: Tensor, base: Tensor, counts: Tensor, num_steps: int, theta: float, rope_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One launch; all integers int64 and contiguous."""
    _checked("chain_rows", places=places, base=base, counts=counts)
    rows = places.shape[0] * num_steps
    positions = torch.empty(rows, dtype=torch.int64, device=places.device)
    request, visible, slots = (torch.empty(rows, dtype=torch.int32, device=places.device) for _ in range(3))
    cos, sin = (torch.empty(rows, rope_dim // 2, dtype=torch.float32, device=places.device) for _ in range(2))
    made = positions, request, visible, slots, cos, sin
    if rows:
        frequencies = rope_frequencies(places.device, theta, rope_dim)
        _CHAIN(_each(rows), places, base, counts, frequencies, *made, places.shape[0], rope_dim // 2)
    return made


@accept_rows.on("sm90")
def accept_rows_sm90(
    sampled: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    rows: Tensor,
    base: Tensor,
    max_lengths: Tensor,
    capacity: Tensor,
    stop_ids: Tensor,
    done: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch; integers int64, flags bool, all contiguous, but for the rows of `drafts`, which may lie apart."""
    _checked("accept_rows", sampled=sampled, num_drafts=num_drafts, rows=rows, base=base)
    _checked("accept_rows", max_lengths=max_lengths, capacity=capacity, stop_ids=stop_ids)
    _checked("accept_rows", torch.bool, done=done)
    if drafts.dtype != torch.int64 or (drafts.shape[1] and drafts.stride(1) != 1):
        raise ValueError(f"accept_rows: drafts is {drafts.dtype}, strides {drafts.stride()}; expected int64 rows")
    requests, width = sampled.shape
    accepted, counts = (torch.empty(requests, dtype=torch.int64, device=sampled.device) for _ in range(2))
    ended, live = (torch.empty(requests, dtype=torch.bool, device=sampled.device) for _ in range(2))
    arguments = sampled, drafts, num_drafts, rows, base, max_lengths, capacity, stop_ids, done
    sizes = requests, width, drafts.stride(0), stop_ids.shape[1]
    _ACCEPT(_spread(requests), *arguments, accepted, counts, ended, live, *sizes)
    return accepted, counts, ended, live


@extend_rows.on("sm90")
def extend_rows_sm90(
    sampled: Tensor,
    counts: Tensor,
    row_index: Tensor,
    sampler_of: Tensor,
    offset: Tensor,
    next_ids: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch; all int64 and contiguous, slots int32."""
    _checked("extend_rows", sampled=sampled, counts=counts, row_index=row_index, sampler_of=sampler_of, offset=offset)
    _checked("extend_rows", next_ids=next_ids)
    slots = slots.to(torch.int32).contiguous()
    following, stored = torch.empty_like(next_ids), torch.empty_like(slots)
    requests, width = sampled.shape
    seed = torch.empty(requests, dtype=torch.int64, device=sampled.device)
    arguments = sampled, counts, row_index, sampler_of, offset, next_ids, slots
    total = next_ids.shape[0]
    _EXTEND(_spread(max(total, requests)), *arguments, following, stored, seed, total, requests, width)
    return following, stored, seed


@seed_rows.on("sm90")
def seed_rows_sm90(hidden: Tensor, slots: Tensor, counts: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One launch where rows are whole pieces of 16 bytes in one block of memory, and counts 32 bits wide; else the reference."""
    _checked("seed_rows", seed=seed)
    sizes = tuple(rows.shape[1] * rows.itemsize for rows in (hidden, slots))
    if (
        not is_dense(hidden, slots)
        or any(size % PIECE_BYTES for size in sizes)
        or counts.itemsize != 4
        or not counts.is_contiguous()
    ):
        return seed_rows.reference(hidden, slots, counts, seed)
    requests = seed.shape[0]
    made = tuple(rows.new_empty((requests, *rows.shape[1:])) for rows in (hidden, slots, counts))
    pieces = tuple(size // PIECE_BYTES for size in sizes)
    if requests:
        how = Launch(grid=(-(-sum(pieces) // 128), requests), block=(128,), programmatic=True)
        _SEED(how, hidden, slots, counts, seed, *made, *pieces)
    return made  # type: ignore[return-value]


@advance_rows.on("sm90")
def advance_rows_sm90(
    tokens: Tensor,
    lengths: Tensor,
    done: Tensor,
    drafted: Tensor,
    rows: Tensor,
    base: Tensor,
    sampled: Tensor,
    counts: Tensor,
    ended: Tensor,
    drafts: Tensor | None,
    likely: Tensor | None,
    threshold: float,
) -> None:
    """One launch; integers int64, flags bool, `likely` float32, all contiguous."""
    _checked("advance_rows", tokens=tokens, lengths=lengths, rows=rows, base=base, sampled=sampled, counts=counts)
    _checked("advance_rows", drafted=drafted)
    _checked("advance_rows", torch.bool, done=done, ended=ended)
    if drafts is not None:
        _checked("advance_rows", drafts=drafts)
    if likely is not None:
        _checked("advance_rows", torch.float32, likely=likely)
    requests, width = sampled.shape
    table, found = (tokens, lengths, done, drafted), (rows, base, sampled, counts, ended, drafts, likely)
    sizes = requests, width, tokens.shape[1], 0 if drafts is None else drafts.shape[1]
    _ADVANCE(_spread(requests), *table, *found, float(threshold), *sizes)


@write_letter.on("sm90")
def write_letter_sm90(
    letters: Tensor,
    number: Tensor,
    sampled: Tensor,
    drafts: Tensor,
    counts: Tensor,
    accepted: Tensor,
    offered: Tensor,
    ended: Tensor,
    live: Tensor,
) -> None:
    """One launch; integers int64, flags bool, all contiguous."""
    _checked("write_letter", letters=letters, number=number, sampled=sampled, drafts=drafts, counts=counts)
    _checked("write_letter", accepted=accepted, offered=offered)
    _checked("write_letter", torch.bool, ended=ended, live=live)
    (requests, width), num_drafts = sampled.shape, drafts.shape[1]
    if letters.shape[1:] != (requests, width + num_drafts + LETTER_EXTRA):
        raise ValueError(
            f"write_letter: letters {tuple(letters.shape)} for {requests} requests of {width} tokens and {num_drafts} drafts"
        )
    arguments = letters, number, sampled, drafts, counts, accepted, offered, ended, live
    _LETTER(_ONE_BLOCK, *arguments, letters.shape[0], requests, width, num_drafts)
