"""The shortest time of an iteration: the bytes it must read, by the rate at which memory gives them.

Owns the count of bytes. Nothing is measured here and nothing is launched: launches, collectives and arithmetic come on top.
Called by `legato bench pareto`, `legato bench isl` and the report.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from legato.model.checkpoint import Checkpoint
from legato.model.footprint import bytes_per_rank, cache_bytes
from legato.model.inventory import stored_spec, survey
from legato.model.names import Expected, Group, expected
from legato.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank by when they are read.

    Attributes:
        spec: of the model.
        trunk, mtp: weights that every pass over the decoder layers, or over the MTP layer, reads: all but routed experts.
        experts, mtp_experts: all routed experts of the layers.
        head: the output head, read by the pass over the trunk and by every pass over the MTP layer.
        latent_row, index_row: cache bytes of one token over the decoder layers.
    """

    spec: ModelSpec
    trunk: int
    mtp: int
    experts: int
    mtp_experts: int
    head: int
    latent_row: int
    index_row: int

    def iteration(self, batch: int, num_drafts: int, context: int) -> float:
        """Bytes of one iteration: verification of `num_drafts` + 1 rows of each of `batch` requests, draft-extend on the same
        rows, then `num_drafts` - 1 single-row steps.

        Routing is taken as uniform and independent, so n rows reach E (1 - (1 - k/E)^n) of E experts. Each request reads its
        index keys once and the latents of `index_topk` tokens once per layer: rows of one request are taken to select alike,
        which makes this a lower bound.
        """
        rows = batch * (num_drafts + 1)
        total = self.trunk + self.head + self.experts * self._share(rows)
        selected = min(context, self.spec.index_topk)
        total += batch * (context * self.index_row + selected * self.latent_row)
        if num_drafts:
            total += self.mtp + self.head + self.mtp_experts * self._share(rows)
            total += (num_drafts - 1) * (self.mtp + self.head + self.mtp_experts * self._share(batch))
        return float(total)

    def _share(self, rows: int) -> float:
        """Expected share of the experts that `rows` rows use."""
        return 1 - (1 - self.spec.experts_per_token / self.spec.num_experts) ** rows


def traffic(checkpoint: Checkpoint, ranks: int = 1, element_bytes: int | None = None) -> Traffic:
    """What one of `ranks` ranks reads, from the headers of a checkpoint.

    `element_bytes`: of every weight, where an engine keeps them all in one format (4 on a CPU); `None`: as stored.

    Raises:
        SpecError: the architecture is not supported.
        CheckpointError: tensors are missing or misshapen.
    """
    spec = stored_spec(checkpoint)
    inventory = survey(checkpoint, spec)
    inventory.require()
    counted: Counter[tuple[bool, Group]] = Counter()
    for entry in expected(spec):
        stored = inventory.linears.get(entry.name)
        size = bytes_per_rank(entry, None if stored is None else stored.format, ranks)
        if element_bytes is not None:
            size = element_bytes * _elements(entry)
        counted[entry.layer == spec.num_layers, entry.group] += size
    cache = cache_bytes(spec)
    layers, full = spec.num_layers + int(spec.has_mtp), spec.num_full + int(spec.has_mtp)
    apart = (Group.EXPERTS, Group.EMBEDDING, Group.HEAD)
    return Traffic(
        spec=spec,
        trunk=sum(size for (mtp, group), size in counted.items() if not mtp and group not in apart),
        mtp=sum(size for (mtp, group), size in counted.items() if mtp and group not in apart),
        experts=counted[False, Group.EXPERTS],
        mtp_experts=counted[True, Group.EXPERTS],
        head=counted[False, Group.HEAD],
        latent_row=cache.latent_bf16 * spec.num_layers // layers,
        index_row=cache.index_keys * spec.num_full // full,
    )


def _elements(entry: Expected) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count
