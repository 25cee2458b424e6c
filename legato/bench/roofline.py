"""The shortest time of an iteration: the bytes it must read, by the rate at which memory gives them.

Owns the count of bytes. Nothing is measured here and nothing is launched: launches, collectives and arithmetic come on top.
Called by `legato bench pareto`, `legato bench isl` and the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from legato.model.checkpoint import Checkpoint
from legato.model.footprint import bytes_per_rank, cache_bytes
from legato.model.inventory import stored_spec, survey
from legato.model.names import Expected, Group, expected
from legato.model.spec import ModelSpec
from legato.quant.formats import Format


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank by when they are read.

    Attributes:
        spec: of the model.
        trunk, mtp: weights that every pass over the decoder layers, or over the MTP layer, reads: all but routed experts.
        experts, mtp_experts: all routed experts of the layers.
        head, draft_head: the output head as the pass over the trunk reads it, and as every pass over the MTP layer does.
        latent_row, index_row: cache bytes of one token over the decoder layers.
    """

    spec: ModelSpec
    trunk: int
    mtp: int
    experts: int
    mtp_experts: int
    head: int
    draft_head: int
    latent_row: int
    index_row: int

    def iteration(self, batch: int, num_drafts: int, context: int, distinct_experts: float | None = None) -> float:
        """Bytes of one iteration: verification of `num_drafts` + 1 rows of each of `batch` requests, draft-extend on the same
        rows, then `num_drafts` - 1 single-row steps.

        Routing is taken as uniform and independent, so n rows reach E (1 - (1 - k/E)^n) of E experts, unless it is known how many
        the verifying rows of a layer reach (`distinct_experts`). Each request reads its
        index keys once and the latents of `index_topk` tokens once per layer: rows of one request are taken to select alike,
        which makes this a lower bound.
        """
        rows = batch * (num_drafts + 1)
        share = self._share(rows) if distinct_experts is None else distinct_experts / self.spec.num_experts
        total = self.trunk + self.head + self.experts * share
        selected = min(context, self.spec.index_topk)
        total += batch * (context * self.index_row + selected * self.latent_row)
        if num_drafts:
            total += self.mtp + self.draft_head + self.mtp_experts * share
            total += (num_drafts - 1) * (self.mtp + self.draft_head + self.mtp_experts * self._share(batch))
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
    formats = {name: stored.format for name, stored in inventory.linears.items()}
    return traffic_of(spec, formats, ranks, element_bytes)


def traffic_of(spec: ModelSpec, formats: Mapping[str, Format], ranks: int, element_bytes: int | None = None) -> Traffic:
    """The same, for linears in these formats by name."""
    counted: Counter[tuple[bool, Group]] = Counter()
    for entry in expected(spec):
        size = bytes_per_rank(entry, formats.get(entry.name), ranks)
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
        draft_head=counted[False, Group.HEAD],
        latent_row=cache.latent_bf16 * spec.num_layers // layers,
        index_row=cache.index_keys * spec.num_full // full,
    )


def _elements(entry: Expected) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count
