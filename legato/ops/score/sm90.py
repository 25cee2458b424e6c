# pyright: basic
"""Index scores on Hopper: the kernel in `sm90.cu` and the plan it walks by.

Owns the choice between the kernel and the reference, the launch and the plan's memory. Knows nothing of selection.
Imported by `bind` on an sm90 target. Nothing here reads a value on the host or copies one to the device.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source, tensor_map
from legato.ops.cache.layout import INDEX_KEY_BYTES, INDEX_PAGE_BYTES, INDEX_WIDTH, PAGE
from legato.ops.score import index_scores
from legato.ops.strides import dense

HEADS = 32
#: Rows of one request that share a reading of its keys.
WINDOW = 8
#: Pages of 8448 bytes in flight per block. More are no faster, and their barriers take time to make.
STAGES = 12
#: Words of the plan per block, and per row (at most one window each).
RECORD_WORDS, WINDOW_WORDS = 40, 4
#: Two warpgroups that multiply and one that loads.
_THREADS = 384
#: As laid out in `sm90.cu`: queries, stages, lengths, progress, gates (padded by 4), two barriers per stage, page ids.
_SHARED_BYTES = (
    WINDOW * HEADS * INDEX_WIDTH + STAGES * (INDEX_PAGE_BYTES + 16) + WINDOW * 4 + 16 + WINDOW * (HEADS + 4) * 4 + 512
)

_SOURCE = Source(Path(__file__).with_name("sm90.cu"), defines={"STAGES": STAGES})
SCORES = Kernel(_SOURCE, "index_scores", shared_bytes=_SHARED_BYTES)
PLAN = Kernel(_SOURCE, "plan_scores")
_PLAN_LAUNCH = Launch(grid=(1,), block=(1024,), programmatic=True)


@cache
def _launch(device: torch.device) -> Launch:
    """One block per SM."""
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(grid=(blocks,), block=(_THREADS,), shared_bytes=_SHARED_BYTES, programmatic=True)


class _Maps:
    """What the copy engine must know of index caches: their keys in swizzled rows, and their scales. Kept by address and
    size, since making one takes the host longer than a launch."""

    _MOST = 1024

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], tuple[Any, Any]] = {}

    def of(self, cache: Tensor) -> tuple[Any, Any]:
        key = (cache.data_ptr(), cache.shape[0], cache.get_device())
        found = self._held.get(key)
        if found is None:
            if len(self._held) >= self._MOST:
                self._held.clear()
            pages, words = cache.shape[0], cache.view(torch.float32)
            keys = cache.as_strided((pages, PAGE, INDEX_WIDTH), (INDEX_PAGE_BYTES, INDEX_WIDTH, 1))
            scales = words.as_strided(
                (pages, PAGE), (INDEX_PAGE_BYTES // 4, 1), words.storage_offset() + INDEX_KEY_BYTES // 4
            )
            found = tensor_map(keys, (1, PAGE, INDEX_WIDTH), swizzle=128), tensor_map(scales, (1, PAGE))
            self._held[key] = found
        return found


_MAPS = _Maps()


def plan_scores(page_table: Tensor, request: Tensor, lengths: Tensor, settled: bool = False) -> Tensor:
    """Which pages of which windows each SM scores, for `index_scores` calls with the same three arguments.

    page_table [B, P] int32, request [T] int32, lengths [T] int32 -> int32 [n], to be passed on as it is. Adjacent rows
    of one request form windows of up to eight; the windows' pages, end to end, are cut into equal runs, one per SM.
    Everything is read on the device, so a captured graph serves every length. `settled`: what made the three is complete when
    whatever was launched last lets the next begin (a product does so), and the plan is made while that still runs. Raises
    ValueError for an argument of another type, or one with gaps.
    """
    for tensor, name in ((page_table, "page_table"), (request, "request"), (lengths, "lengths")):
        _check(tensor, torch.int32, name)
    (blocks,) = _launch(page_table.device).grid
    rows = request.shape[0]
    plan = torch.empty(blocks * RECORD_WORDS + rows * WINDOW_WORDS, dtype=torch.int32, device=page_table.device)
    PLAN(_PLAN_LAUNCH, page_table, page_table.shape[1], request, lengths, rows, blocks, int(settled), plan)
    return plan


def serves(q: Tensor, cache: Tensor) -> bool:
    """Whether the kernel takes these shapes: e4m3 queries of 32 heads of 128, and the byte cache. The reference runs
    for all others."""
    return q.dtype == torch.float8_e4m3fn and q.shape[1:] == (HEADS, INDEX_WIDTH) and cache.dtype == torch.uint8


@torch.library.custom_op("legato::index_scores", mutates_args=(), device_types="cuda")
def _score(
    q: Tensor,
    gates: Tensor,
    cache: Tensor,
    page_table: Tensor,
    request: Tensor,
    lengths: Tensor,
    plan: Tensor | None,
) -> Tensor:
    rows, width = q.shape[0], page_table.shape[1]
    scores = torch.empty(rows, width * PAGE, dtype=torch.float32, device=q.device)
    if rows:
        plan = plan_scores(page_table, request, lengths) if plan is None else plan
        SCORES(_launch(q.device), *_MAPS.of(cache), dense(q), gates, page_table, width, lengths, plan, scores)
    return scores


@_score.register_fake
def _(
    q: Tensor,
    gates: Tensor,
    cache: Tensor,
    page_table: Tensor,
    request: Tensor,
    lengths: Tensor,
    plan: Tensor | None,
) -> Tensor:
    return gates.new_empty(q.shape[0], page_table.shape[1] * PAGE)


@index_scores.on("sm90", plan=plan_scores)
def index_scores_sm90(
    q: Tensor,
    gates: Tensor,
    cache: Tensor,
    page_table: Tensor,
    request: Tensor,
    lengths: Tensor,
    plan: Tensor | None = None,
) -> Tensor:
    """The scores by `sm90.cu` where it `serves`, otherwise by the reference.

    Raises ValueError for an argument of another type than the contract's, one with gaps, or more scores than 2^32 - 1.
    Writes -inf from a row's length to the end of the last page that its window sees, and nothing beyond.
    """
    if not serves(q, cache):
        return index_scores.reference(q, gates, cache, page_table, request, lengths)
    for tensor, dtype, name in ((q, q.dtype, "q"), (gates, torch.float32, "gates"), (cache, torch.uint8, "cache")):
        _check(tensor, dtype, name)
    rows, width = q.shape[0], page_table.shape[1]
    if rows * width * PAGE >= 1 << 32:
        raise ValueError(
            f"index_scores: {rows} rows of {width * PAGE} scores are more than 2^32 - 1; score fewer rows at a time"
        )
    return torch.ops.legato.index_scores(q, gates, cache, page_table, request, lengths, plan)


def _check(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    if tensor.dtype != dtype or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "with gaps"
        raise ValueError(f"index_scores: {name} is {tensor.dtype}, {layout}; expected {dtype}, contiguous")
