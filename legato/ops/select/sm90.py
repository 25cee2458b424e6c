# pyright: basic
"""Selection on Hopper: one launch of `top_k.cu` for rows of any lengths, driven by the lengths on the device, or of
`top_k_short.cu` where the table is narrow; and the plan of which thread blocks take which row.

Owns how many thread blocks there are, from what the host knows (rows and width), the plan's memory and the registration with
PyTorch. Must not read a tensor's values: how many blocks share a row is decided on the device, from its length. Imported by
`bind` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from legato.ops.build import Kernel, Launch, Source
from legato.ops.select import top_k

#: Bytes at the start of the shared memory that the quick way of `top_k.cu` keeps its counters in; the source checks them.
QUICK_BYTES = 22 * 1024
_MOST_BYTES = 227 * 1024
#: Two blocks share a multiprocessor up to this size, and do not from the next kilobyte on.
_HALF_BYTES = 113 * 1024
#: The last digit of a position is 11 bits, the one before it at most 12: see the exhaustive way.
_MOST_SCORES = 1 << 23
#: As many blocks share a row as have so many scores each: more would wait for one another longer than they read. Where rows
#: are so few that no processor is short, a score for each thread.
SHARE, FEW_ROWS_SHARE = 2048, 512
#: A group of samples is so large that this many of it are among the chosen, or less (`top_k.cu` puts a bound on it).
_CHOSEN_IN_GROUP = 0.4


@dataclass(frozen=True)
class Form:
    """One compilation of `top_k.cu`: threads of a block, blocks that a multiprocessor must hold, lines of 128 scores that
    a warp looks at in one go, how many it has under way in shared memory (0: one go's, in registers), and bytes of the
    exhaustive way's counters."""

    threads: int
    resident: int
    lines: int
    ring_lines: int
    exhaustive_bytes: int

    @property
    def warps(self) -> int:
        return self.threads // 32

    def quick_bytes(self, listed: int) -> int:
        """Shared memory with which the quick way can list `listed` scores in every warp, all of which may be."""
        if self.ring_lines:
            # The list stands where the lines were; before it, four scores and their place take 20 bytes.
            return QUICK_BYTES + self.warps * (self.ring_lines * 512 + -(-listed // 128) * 32 * 20)
        return QUICK_BYTES + self.warps * listed * 8


#: A multiprocessor for every block; two blocks on one.
SPARSE, DENSE = Form(512, 1, 4, 12, 76 * 1024), Form(512, 2, 3, 0, 76 * 1024)


@cache
def kernel(form: Form, name: str = "top_k") -> Kernel:
    """A kernel of a form: `top_k`, `planned_top_k` or `plan_top_k`."""
    source = Source(
        Path(__file__).with_name("top_k.cu"),
        {
            "THREADS": form.threads,
            "RESIDENT": form.resident,
            "LINES": form.lines,
            "RING_LINES": form.ring_lines,
            "QUICK_BYTES": QUICK_BYTES,
            "SHARED_BYTES": form.exhaustive_bytes,
        },
    )
    return Kernel(source, name, shared_bytes=0 if name == "plan_top_k" else _MOST_BYTES, non_portable_cluster=True)


#: `top_k_short.cu`: threads of a block, scores that each has in registers, bytes of the exhaustive way's counters.
SHORT_THREADS, SHORT_EACH, SHORT_BYTES = 512, 8, 76 * 1024
#: In a table no wider than this a row has one block, which reads it once.
SHORT_WIDTH = SHORT_THREADS * SHORT_EACH


@cache
def short_kernel() -> Kernel:
    """`top_k_short`, for tables up to `SHORT_WIDTH` wide."""
    macros = {"THREADS": SHORT_THREADS, "QUADS_EACH": SHORT_EACH // 4, "SHARED_BYTES": SHORT_BYTES}
    return Kernel(Source(Path(__file__).with_name("top_k_short.cu"), macros), "top_k_short", shared_bytes=SHORT_BYTES)


@dataclass(frozen=True)
class Cut:
    """How a launch is cut: its form, thread blocks that may share a row (a power of two), scores that each of them has at least
    (but for the last halving), and the shared memory of each."""

    form: Form
    blocks: int
    share: int
    shared_bytes: int


@cache
def cut(rows: int, width: int, processors: int) -> Cut:
    """The cut for `rows` rows of up to `width` scores on a device of so many multiprocessors.

    As many blocks for a row as there are processors for them, but none with fewer than its share of scores. Where the rows
    alone take more than half of the processors, two for each. Where every block can have a processor of its own, it
    asks for more than half of its shared memory, so that it gets it; otherwise for less, so that two fit. Clusters need
    neighbouring processors: with more than three quarters of them wanted, some would wait for others to end.
    """
    blocks, share = 1, FEW_ROWS_SHARE if 8 * rows <= processors else SHARE
    while blocks < 16 and 2 * blocks * rows <= processors and share * blocks < width:
        blocks *= 2
    if blocks == 1 and processors // 2 < rows <= processors and width > 2 * SHARE:
        blocks = 2
    sparse = rows * blocks <= (processors if blocks == 1 else processors * 3 // 4)
    form = SPARSE if sparse else DENSE
    listed = -(-width // (blocks * form.warps)) + 128
    wanted = max(form.quick_bytes(listed), form.exhaustive_bytes)
    least, most = (_HALF_BYTES + 1024, _MOST_BYTES) if sparse else (0, _HALF_BYTES)
    return Cut(form, blocks, share, min(max(wanted, least), most))


#: Fewer rows, where they are alike, may need a second turn, which doubles the time; more always do (NOTES.md).
LEAST_PLANNED, MOST_PLANNED = 20, 24
#: Blocks of a cluster that takes rows by a plan: all of them may share one.
POOL_CLUSTER = 16
#: The plan has a thread for each row, and in any case so many.
_PLAN_LAUNCH = Launch(grid=(1,), block=(1024,), programmatic=True)


@cache
def pool(processors: int) -> int:
    """How many blocks take rows in turn, by a plan: whole clusters, one block for a multiprocessor, and no more than run at once:
    the neighbours of the last quarter may not be free together."""
    return processors * 3 // 4 // POOL_CLUSTER * POOL_CLUSTER


def plan_top_k(lengths: Tensor, request: Tensor, k: int) -> Tensor | None:
    """Which thread blocks take which row, for `top_k` calls with the same three arguments; None for rows so few or so many
    that a cluster of its own serves each best.

    lengths and request [T] int32 -> int32 [n], to be passed on as it is. Everything is read on the device, so a captured
    graph serves every length. Raises ValueError for arguments of another type.
    """
    rows = lengths.shape[0]
    if not LEAST_PLANNED <= rows <= MOST_PLANNED:
        return None
    if lengths.dtype != torch.int32 or request.dtype != torch.int32:
        raise ValueError(f"top_k.plan: lengths are {lengths.dtype}, request is {request.dtype}; expected int32")
    blocks = pool(_processors(lengths.device))
    # A row of a portion takes one block, a longer one less than two for each portion; portions are five quarters of a block's
    # share of all, so that turns never have more than 8 / 5 blocks + rows, and fill the last one.
    plan = torch.empty((1 + rows + 3 * blocks) * 4, dtype=torch.int32, device=lengths.device)
    kernel(SPARSE, "plan_top_k")(
        _PLAN_LAUNCH,
        lengths.contiguous(),
        request.contiguous(),
        rows,
        k,
        POOL_CLUSTER.bit_length() - 1,
        blocks,
        SHARE,
        plan,
    )
    return plan


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.library.custom_op("legato::top_k", mutates_args=(), device_types="cuda")
def _select(
    scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor, plan: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, width = scores.shape
    slots = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows, dtype=torch.int32, device=scores.device)
    if not rows:
        return slots, counts
    if scores.stride(1) != 1 or scores.stride(0) % 4 or scores.data_ptr() % 16:
        scores = functional.pad(scores, (0, -width % 4)).contiguous()
    if width <= SHORT_WIDTH:
        short_kernel()(
            Launch(grid=(rows,), block=(SHORT_THREADS,), shared_bytes=SHORT_BYTES, programmatic=True),
            scores,
            lengths,
            page_table,
            request,
            slots,
            counts,
            scores.stride(0),
            page_table.stride(0),
            k,
            width,
            SHORT_BYTES,
        )
        return slots, counts
    if plan is not None:
        blocks = pool(_processors(scores.device))
        kernel(SPARSE, "planned_top_k")(
            Launch(
                grid=(blocks,),
                block=(SPARSE.threads,),
                cluster=(POOL_CLUSTER,),
                shared_bytes=_MOST_BYTES,
                programmatic=True,
            ),
            scores,
            plan,
            page_table,
            slots,
            counts,
            scores.stride(0),
            page_table.stride(0),
            k,
            POOL_CLUSTER.bit_length() - 1,
            _MOST_BYTES,
            _CHOSEN_IN_GROUP / k,
        )
        return slots, counts
    how = cut(rows, width, _processors(scores.device))
    kernel(how.form)(
        Launch(
            grid=(rows * how.blocks,),
            block=(how.form.threads,),
            cluster=(how.blocks,),
            shared_bytes=how.shared_bytes,
            programmatic=True,
        ),
        scores,
        lengths,
        page_table,
        request,
        slots,
        counts,
        scores.stride(0),
        page_table.stride(0),
        k,
        how.blocks.bit_length() - 1,
        how.shared_bytes,
        how.share,
        _CHOSEN_IN_GROUP / k,
    )
    return slots, counts


@_select.register_fake
def _(
    scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor, plan: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = scores.shape[0]
    return scores.new_empty(rows, k, dtype=torch.int32), scores.new_empty(rows, dtype=torch.int32)


@top_k.on("sm90", plan=plan_top_k)
def top_k_sm90(
    scores: Tensor, lengths: Tensor, k: int, page_table: Tensor, request: Tensor, plan: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`top_k` for float32 scores of up to 2^23 positions; lengths, table and request int32.

    Rows that do not start at a multiple of 16 bytes are copied first. Raises ValueError for what it cannot read.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32:
        raise ValueError(f"top_k: scores are {scores.dtype} {tuple(scores.shape)}; expected float32 [T, L]")
    if k < 1 or scores.shape[1] > _MOST_SCORES:
        raise ValueError(f"top_k: k = {k}, width {scores.shape[1]}; k is at least 1, a row at most {_MOST_SCORES} long")
    if page_table.shape[1] * 64 < scores.shape[1]:
        raise ValueError(f"top_k: a table of {page_table.shape[1]} pages is too narrow for {scores.shape[1]} scores")
    table = page_table.to(torch.int32)
    return torch.ops.legato.top_k(
        scores,
        lengths.to(torch.int32).contiguous(),
        k,
        table if table.stride(1) == 1 else table.contiguous(),
        request.to(torch.int32).contiguous(),
        plan,
    )
