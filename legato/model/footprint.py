"""The memory plan of a checkpoint: bytes per rank and part, cache bytes per token, longest context per number of GPUs.

Owns the arithmetic, from headers alone. Must not read data, start anything or print (`legato.model.footprint_text`
does). Called by `legato plan` and where an engine starts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from legato.model.checkpoint import Checkpoint
from legato.model.faults import CheckpointError, Problem
from legato.model.inventory import Inventory, stored_spec, survey
from legato.model.names import Expected, Group, Kind, Split, expected
from legato.model.spec import ModelSpec, SpecError
from legato.ops.cache.layout import LATENT_BYTES, LATENT_ROPE, LATENT_WIDTH
from legato.quant.formats import Format, resident_bytes, split_multiple

H200_BYTES = 150_000_000_000
"""What a program finds on an H200 (records/2026-11-30-doctor), which is sold as 141 GB."""
FILLED = 0.85
"""Of a GPU's memory, for weights and caches, where nothing else is said: CUDA's context, graphs, repacked weights, activations
and tiles of index scores take of the rest."""
RANKS = (1, 2, 4, 8)
PAGE_TOKENS = 64
MTP = "MTP layer"


@dataclass(frozen=True)
class CacheBytes:
    """Bytes per token over all layers, MTP layer included. `latent_fp8` is None where the latent width is not a
    multiple of 128."""

    latent_bf16: int
    latent_fp8: int | None
    index_keys: int

    def per_token(self, latent: str) -> int | None:
        """Latent and index keys together, for a "bf16" or "fp8" latent."""
        size = self.latent_bf16 if latent == "bf16" else self.latent_fp8
        return None if size is None else size + self.index_keys


@dataclass(frozen=True)
class RankPlan:
    """One rank of a group of `ranks`: weight bytes by part, what is left for the caches, and what that holds.

    `capacity_tokens` counts all requests together; `longest_context` is the longest single request, bounded by the
    model's limit. Both are per latent format. The caches are replicated: every rank holds every token. `refusal` says
    why this group cannot run.
    """

    ranks: int
    weight_bytes: Mapping[str, int]
    reserve_bytes: int
    free_bytes: int
    capacity_tokens: Mapping[str, int]
    longest_context: Mapping[str, int]
    refusal: str | None

    @property
    def total_weight_bytes(self) -> int:
        """Weights of one rank."""
        return sum(self.weight_bytes.values())


@dataclass(frozen=True)
class Footprint:
    """The plan of one checkpoint. `refusal` is why it cannot run at all; the other fields are then as complete as was
    possible."""

    label: str
    refusal: str | None
    spec: ModelSpec | None
    stored_bytes: int
    num_parameters: int
    formats: Mapping[str, int]
    ignored: Mapping[str, int]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    cache: CacheBytes | None
    gpu_bytes: int
    plans: tuple[RankPlan, ...]


def plan(
    where: str | Path | Checkpoint,
    *,
    ranks: Sequence[int] = RANKS,
    gpu_bytes: int = H200_BYTES,
) -> Footprint:
    """Plans a folder or hub id from its headers, for GPUs that are filled as an engine does it by default. Never raises for what
    it finds there: read `refusal`."""
    label = where.label if isinstance(where, Checkpoint) else str(where)
    try:
        checkpoint = where if isinstance(where, Checkpoint) else Checkpoint.open(where)
    except CheckpointError as error:
        return _refused(label, gpu_bytes, str(error.problems[0]), error.problems)
    try:
        spec = stored_spec(checkpoint)
    except SpecError as error:
        return _refused(label, gpu_bytes, str(error), (), checkpoint.nbytes)
    inventory = survey(checkpoint, spec)
    cache = cache_bytes(spec)
    entries = expected(spec)
    alike = _alike(spec, inventory, entries)
    plans = tuple(_rank_plan(spec, alike, cache, count, gpu_bytes) for count in ranks)
    return Footprint(
        label=label,
        refusal=_refusal(inventory, plans),
        spec=spec,
        stored_bytes=checkpoint.nbytes,
        num_parameters=sum(_count(entry) for entry in entries),
        formats=dict(Counter(stored.format.value for stored in inventory.linears.values())),
        ignored=dict(Counter(inventory.ignored.values())),
        problems=tuple(inventory.problems),
        warnings=tuple(inventory.warnings),
        cache=cache,
        gpu_bytes=gpu_bytes,
        plans=plans,
    )


def cache_bytes(spec: ModelSpec) -> CacheBytes:
    """Bytes that one token adds: a latent row (C + R) per layer, an index key per full layer; the MTP layer has both.

    fp8 latent: as `legato.ops.cache.layout` has it, which holds 512 + 64 numbers and no others. Index key: X e4m3 codes and one
    fp32 scale (132 bytes at 128).
    """
    layers, full = spec.num_layers + int(spec.has_mtp), spec.num_full + int(spec.has_mtp)
    fits_fp8 = (spec.kv_lora_rank, spec.rope_dim) == (LATENT_WIDTH, LATENT_ROPE)
    return CacheBytes(
        latent_bf16=layers * 2 * spec.latent_dim,
        latent_fp8=layers * LATENT_BYTES if fits_fp8 else None,
        index_keys=full * (spec.index_dim + 4),
    )


def _count(entry: Expected) -> int:
    return math.prod(entry.shape)


def _refused(label: str, gpu_bytes: int, refusal: str, problems: Sequence[Problem], stored_bytes: int = 0) -> Footprint:
    return Footprint(label, refusal, None, stored_bytes, 0, {}, {}, tuple(problems), (), None, gpu_bytes, ())


def _refusal(inventory: Inventory, plans: Sequence[RankPlan]) -> str | None:
    if inventory.problems:
        return f"{len(inventory.problems)} faults in the checkpoint; the first: {inventory.problems[0]}"
    if plans and all(entry.refusal is not None for entry in plans):
        return f"no group of {', '.join(str(entry.ranks) for entry in plans)} GPUs can run it; {plans[-1].refusal}"
    return None


@dataclass(frozen=True)
class _Alike:
    """Tensors that take the same bytes and split the same way. `stored` is None for plain floats."""

    part: str
    stored: Format | None
    shape: tuple[int, ...]
    split: Split
    widened: int


def _alike(spec: ModelSpec, inventory: Inventory, entries: Sequence[Expected]) -> dict[_Alike, tuple[int, str]]:
    """`{class: (count, name of one)}`: a release has 60,000 linears of some 40 classes."""
    classes: dict[_Alike, tuple[int, str]] = {}
    for entry in entries:
        stored = inventory.linears.get(entry.name)
        if entry.kind is Kind.LINEAR and stored is None:
            continue
        part = MTP if entry.layer == spec.num_layers else entry.group.value
        key = _Alike(part, stored.format if stored else None, entry.shape, entry.split, _widened(entry))
        count, name = classes.get(key, (0, entry.name))
        classes[key] = (count + 1, name)
    return classes


def bytes_per_rank(entry: Expected, stored: Format | None, ranks: int) -> int:
    """Bytes of one tensor on the device of one rank, when linears keep their format (`None`: a plain float)."""
    return _bytes_per_rank(_Alike("", stored, entry.shape, entry.split, _widened(entry)), ranks)


def weights_per_rank(inventory: Inventory, spec: ModelSpec, ranks: int, itemsize: int | None) -> int:
    """Bytes of one rank's weights on its device: in the formats of the checkpoint (`itemsize` None), or dequantised to so many
    bytes per element. What the checkpoint lacks counts nothing: loading says so."""
    total = 0
    for key, (count, _) in _alike(spec, inventory, expected(spec)).items():
        if itemsize is not None:
            key = replace(key, widened=max(itemsize, key.widened))
        total += count * _bytes_per_rank(key, ranks)
    return total


def _widened(entry: Expected) -> int:
    """Bytes per element where the model uses a weight unquantised whatever its format, else 0."""
    if entry.name.endswith((".mlp.gate", "e_score_correction_bias")):
        return 4
    return 2 if entry.kind is Kind.FLOAT or entry.name.endswith(".kv_b_proj") else 0


def _rank_plan(
    spec: ModelSpec,
    alike: Mapping[_Alike, tuple[int, str]],
    cache: CacheBytes,
    ranks: int,
    gpu_bytes: int,
) -> RankPlan:
    reserve_bytes = gpu_bytes - round(FILLED * gpu_bytes)
    weights: dict[str, int] = {}
    for key, (count, _) in alike.items():
        weights[key.part] = weights.get(key.part, 0) + count * _bytes_per_rank(key, ranks)
    free = gpu_bytes - reserve_bytes - sum(weights.values())
    capacity: dict[str, int] = {}
    for latent in ("bf16", "fp8"):
        per_token = cache.per_token(latent)
        if per_token is not None:
            capacity[latent] = max(0, free) // (per_token * PAGE_TOKENS) * PAGE_TOKENS
    longest = {latent: min(tokens, spec.max_position) for latent, tokens in capacity.items()}
    refusal = _unsplittable(spec, alike, ranks)
    if refusal is None and not any(capacity.values()):
        needed = (sum(weights.values()) + reserve_bytes) / 1e9
        refusal = f"weights and reserve need {needed:.1f} GB per GPU, there are {gpu_bytes / 1e9:.1f} GB"
    return RankPlan(ranks, weights, reserve_bytes, free, capacity, longest, refusal)


def _bytes_per_rank(key: _Alike, ranks: int) -> int:
    shape = list(key.shape)
    if key.split is not Split.REPLICATED:
        axis = 0 if key.split is Split.ROWS else 1
        shape[axis] = -(-shape[axis] // ranks)
    if key.widened or key.stored is None:
        return key.widened * math.prod(shape)
    return resident_bytes(key.stored, *shape)


def _unsplittable(spec: ModelSpec, alike: Mapping[_Alike, tuple[int, str]], ranks: int) -> str | None:
    """Why the weights cannot be divided by `ranks`, or None. The vocabulary may divide unevenly."""
    if ranks == 1:
        return None
    if spec.num_heads % ranks:
        return f"{spec.num_heads} attention heads do not divide by {ranks}"
    for key, (_, name) in alike.items():
        if key.split is Split.REPLICATED or key.part == Group.HEAD.value or key.stored is None or key.widened:
            continue
        axis, side = (0, "rows") if key.split is Split.ROWS else (1, "columns")
        multiple = split_multiple(key.stored, axis)
        if key.shape[axis] % (ranks * multiple):
            unit = f" into blocks of {multiple}" if multiple > 1 else ""
            return f"the {key.shape[axis]} {side} of {name} ({key.stored.value}) do not divide by {ranks}{unit}"
    return None
