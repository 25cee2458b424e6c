"""Which part of every stored tensor a tensor-parallel rank reads.

Owns the borders: heads stay whole, blocks and groups of a format never straddle two ranks, the vocabulary is padded. Reads no
file. Called by the loader, before the first byte is read. How a tensor splits stands in `legato.model.names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from legato.model.inventory import Inventory
from legato.model.names import Expected, Group, Split
from legato.model.spec import ModelSpec, SpecError
from legato.parallel.mesh import Mesh
from legato.quant.formats import Format, part_span, split_multiple


@dataclass(frozen=True, slots=True)
class Region:
    """Entries `start` to `stop` of a tensor along `axis`, 0 for rows and 1 for columns."""

    axis: int
    start: int
    stop: int


Regions = Mapping[str, Region]
"""By the name of the stored tensor; a name that is not there is read whole."""


def regions(inventory: Inventory, spec: ModelSpec, mesh: Mesh) -> dict[str, Region]:
    """What rank `mesh.rank` of `mesh.size` reads of every tensor that is split.

    Raises:
        SpecError: a width does not divide, or its share would cut a block; the message names the tensor.
    """
    found: dict[str, Region] = {}
    if not mesh.is_sharded:
        return found
    for stored in inventory.linears.values():
        if stored.expected.split is Split.REPLICATED:
            continue
        axis = 0 if stored.expected.split is Split.ROWS else 1
        start, stop = share_of(stored.expected, stored.format, spec, mesh)
        for suffix, name in stored.names.items():
            span = part_span(stored.format, suffix)
            if span is not None:
                found[name] = Region(axis, start // span[axis], -(-stop // span[axis]))
    return found


def vocabulary_rows(spec: ModelSpec, multiple: int, mesh: Mesh) -> int:
    """Rows of the output head on each rank, the padding at the end of the last ones included: a multiple of `multiple`
    where there is more than one rank."""
    if not mesh.is_sharded:
        return spec.vocab_size
    each = -(-spec.vocab_size // mesh.size)
    return -(-each // multiple) * multiple


def share_of(entry: Expected, stored: Format, spec: ModelSpec, mesh: Mesh) -> tuple[int, int]:
    """Where a rank's rows (or columns, where those are split) of a weight in a format begin and end.

    Raises:
        SpecError: as `regions`.
    """
    axis = 0 if entry.split is Split.ROWS else 1
    width, multiple = entry.shape[axis], split_multiple(stored, axis)
    if not mesh.is_sharded:
        return 0, width
    if entry.group is Group.HEAD:
        each = vocabulary_rows(spec, multiple, mesh)
        return min(mesh.rank * each, width), min((mesh.rank + 1) * each, width)
    if entry.group is Group.ATTENTION and spec.num_heads % mesh.size:
        raise _indivisible(entry, f"{spec.num_heads} attention heads", "num_attention_heads", mesh)
    side = "rows" if axis == 0 else "columns"
    if width % (mesh.size * multiple):
        unit = f" in blocks of {multiple}" if multiple > 1 else ""
        raise _indivisible(entry, f"{width} {side} ({stored.value}{unit})", _FIELDS[entry.group], mesh)
    share = mesh.share(width)
    return share.start, share.stop


_FIELDS = {
    Group.ATTENTION: "num_attention_heads",
    Group.DENSE_MLP: "intermediate_size",
    Group.EXPERTS: "moe_intermediate_size",
    Group.SHARED_EXPERT: "moe_intermediate_size",
}
"""The key of the configuration behind the width that is split."""


def _indivisible(entry: Expected, width: str, field: str, mesh: Mesh) -> SpecError:
    return SpecError(field, f"{entry.name}: {width} do not divide over {mesh.size} ranks; use fewer")
