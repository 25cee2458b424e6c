"""Which op each kernel of an iteration belongs to, and the bytes of weights and caches that the op could not do without.

Owns the count of bytes by op, and the reading of a recording in which every call of an op stands between two marks: kernels that
nothing else launches. What is attributed is an iteration launched kernel by kernel, which is what a graph is captured from.
Called by `legato.bench.slice_trace`.
"""

from __future__ import annotations

import contextlib
import difflib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from legato.bench.trace import Span
from legato.config import PAGE_SIZE
from legato.ops.op import Op, registered

OUTSIDE = "PyTorch, between ops"
MARK = "sinc"
"""In the name of the kernel of `torch.sinc_`, which no model needs."""
_EMBEDDING = frozenset({"embed_norm", "mtp_inputs", "mtp_looked_up"})
"""Ops that look rows up in a table."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op, and the bytes of weights and caches that it must read."""

    op: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Noted:
    """Calls of ops with their arguments, in order. Bytes are counted afterwards, since counting launches kernels of its own."""

    held: frozenset[int]
    made: list[tuple[Op[..., Any], tuple[Any, ...] | None]] = field(
        default_factory=list[tuple[Op[..., Any], tuple[Any, ...] | None]]
    )

    def calls(self) -> list[Call]:
        """With their bytes; making an op's plan (which has no arguments here) needs none."""
        return [
            Call(op.name, 0 if arguments is None else bytes_needed(op, arguments, self.held))
            for op, arguments in self.made
        ]


@dataclass(frozen=True, slots=True)
class Piece:
    """One kernel: its name, the op that launched it, and its part of the op's bytes (all of them at its first kernel)."""

    kernel: str
    op: str
    num_bytes: int


@contextlib.contextmanager
def noted(weights: object, mark: Callable[[], object] = lambda: None) -> Generator[Noted]:
    """While it lasts, calls of ops are noted, in order, and `mark` is called before and after each. A call within a call belongs
    to the outer one."""
    found, depth = Noted(storages(weights)), [0]

    def wrapped(op: Op[..., Any], run: Callable[..., Any], is_plan: bool) -> Callable[..., Any]:
        def noting(*arguments: Any, **named: Any) -> Any:
            if depth[0]:
                return run(*arguments, **named)
            depth[0] = 1
            try:
                mark()
                result = run(*arguments, **named)
                mark()
            finally:
                depth[0] = 0
            found.made.append((op, None if is_plan else (*arguments, *named.values())))
            return result

        return noting

    before = {op: op.bound for op in registered()}
    try:
        for op, bound in before.items():
            plan = None if bound.plan is None else wrapped(op, bound.plan, True)
            op.bound = replace(bound, run=wrapped(op, bound.run, False), plan=plan)
        yield found
    finally:
        for op, bound in before.items():
            op.bound = bound


def bytes_needed(op: Op[..., Any], arguments: Sequence[Any], held: frozenset[int]) -> int:
    """Bytes of weights (`held`: where they lie) and of caches that a call must read; rows come out of the L2 and count nothing.

    Routed experts count as often as they were chosen at all; of caches, each selected token's latent once, and each request's
    index keys once. Of an embedding only rows are read, which count nothing either.
    """
    if op.name == "sparse_mla":
        cache, slots, counts = cast("tuple[Tensor, Tensor, Tensor]", arguments[1:4])
        filled = torch.arange(slots.shape[1], device=slots.device) < counts[:, None]
        return int(slots[filled].unique().numel()) * _row_bytes(cache)
    if op.name == "index_scores":
        keys, request, lengths = (cast("Tensor", arguments[place]) for place in (2, 4, 5))
        longest: dict[int, int] = {}
        for row, length in zip(request.tolist(), lengths.tolist(), strict=True):
            longest[row] = max(length, longest.get(row, 0))
        return sum(longest.values()) * keys[0].nbytes // PAGE_SIZE
    if op.name in _EMBEDDING:
        return 0
    found = {tensor.data_ptr(): tensor for tensor in _read(arguments) if tensor.untyped_storage().data_ptr() in held}
    if op.folder == "experts" and op.name.startswith("moe_"):
        ids = cast("Tensor", arguments[1])
        experts = cast("Tensor", arguments[3]).shape[0]  # of w13
        reached = int(ids[ids >= 0].unique().numel())
        return sum(
            tensor.nbytes * reached // experts if tensor.shape[0] == experts else tensor.nbytes
            for tensor in found.values()
        )
    return sum(tensor.nbytes for tensor in found.values())


def storages(weights: object) -> frozenset[int]:
    """Where the memory of all tensors in a tree of dataclasses begins, packed forms that a weight has made of itself included."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in _tensors([weights]))


def _tensors(values: Sequence[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.numel():
                yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(cast("Sequence[object]", value))
        elif is_dataclass(value) and not isinstance(value, type):
            own = {part.name: getattr(value, part.name) for part in fields(value)}
            yield from _tensors(list({**own, **getattr(value, "__dict__", {})}.values()))


def _read(arguments: Sequence[object]) -> Iterator[Tensor]:
    """What a call reads of its arguments: of a weight that is kept in several forms, the first of the largest."""
    for value in arguments:
        if is_dataclass(value):
            yield from sorted(_tensors([value]), key=lambda tensor: -tensor.nbytes)[:1]
        else:
            yield from _tensors([value])


def _row_bytes(cache: Tensor) -> int:
    return cache[0].nbytes // PAGE_SIZE


def pieces(spans: Sequence[Span], calls: Sequence[Call]) -> list[Piece]:
    """The kernels of a marked recording in order, without the marks.

    Raises:
        ValueError: there are not two marks for each call.
    """
    found: list[Piece] = []
    marks = 0
    for span in sorted(spans, key=lambda span: span.start):
        if MARK in span.name:
            marks += 1
            continue
        call, is_within = divmod(marks, 2)
        if not is_within or call >= len(calls):
            found.append(Piece(span.name, OUTSIDE, 0))
        else:
            is_first = not found or found[-1].op != f"{call} {calls[call].op}"
            found.append(Piece(span.name, f"{call} {calls[call].op}", calls[call].num_bytes if is_first else 0))
    if marks != 2 * len(calls):
        raise ValueError(f"{marks} marks were recorded around {len(calls)} calls")
    return [replace(piece, op=piece.op.partition(" ")[2] if piece.op != OUTSIDE else OUTSIDE) for piece in found]


@dataclass(frozen=True, slots=True)
class OpTime:
    """All calls of one op in an iteration.

    Attributes:
        launches: of its kernels.
        us: by how much its kernels moved the end of the iteration on; over all ops this is the whole iteration.
        floor_us: of the bytes that it could not do without; `None` where the rate of memory is not on record.
        kernels: their names, the first of each.
    """

    op: str
    launches: int
    us: float
    floor_us: float | None
    kernels: tuple[str, ...]

    @property
    def above_us(self) -> float:
        """Time that its bytes do not explain."""
        return self.us - (self.floor_us or 0.0)


def op_times(iteration: Sequence[Span], attributed: Sequence[Piece], bytes_per_us: float | None) -> list[OpTime]:
    """Where the time of an iteration goes, by op, the one furthest above its floor first.

    `iteration`: the spans of one graph launch. `attributed`: the same kernels, launched one by one; where the sequences part (a
    graph also writes the letter to the host), kernels go to the op that launches kernels of that name elsewhere.
    """
    spans = sorted(iteration, key=lambda span: span.start)
    ops = _aligned([span.name for span in spans], attributed)
    times: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    reached = spans[0].start if spans else 0
    for span, op in sorted(zip(spans, ops, strict=True), key=lambda pair: pair[0].stop):
        times[op] += span.stop - reached
        reached = span.stop
        launches[op] += 1
        names[op][span.name] = None
    floors: defaultdict[str, int] = defaultdict(int)
    for piece in attributed:
        floors[piece.op] += piece.num_bytes
    found = [
        OpTime(op, launches[op], us / 1e3, floors[op] / bytes_per_us if bytes_per_us else None, tuple(names[op]))
        for op, us in times.items()
    ]
    return sorted(found, key=lambda one: -one.above_us)


def _aligned(names: Sequence[str], attributed: Sequence[Piece]) -> list[str]:
    """The op of each kernel of a graph."""
    theirs = [piece.kernel for piece in attributed]
    matcher = difflib.SequenceMatcher(None, names, theirs, autojunk=False)
    found: list[str | None] = [None] * len(names)
    for block in [(0, 0, len(names))] if list(names) == theirs else matcher.get_matching_blocks():
        first, other, size = block
        for place in range(size):
            found[first + place] = attributed[other + place].op
    usual = _usual(attributed)
    return [usual.get(name, OUTSIDE) if op is None else op for name, op in zip(names, found, strict=True)]


def _usual(attributed: Sequence[Piece]) -> Mapping[str, str]:
    counted: dict[str, dict[str, int]] = {}
    for piece in attributed:
        of_kernel = counted.setdefault(piece.kernel, {})
        of_kernel[piece.op] = of_kernel.get(piece.op, 0) + 1
    return {kernel: max(ops, key=lambda op: ops[op]) for kernel, ops in counted.items()}
