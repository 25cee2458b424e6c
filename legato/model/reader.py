"""Reading single weights of a checkpoint: a rank's part of each, checked, in the format it is kept in, on the device.

Owns residency, progress and the faults of values. Must not know the layers (`legato.model.weights`) or where borders lie
(`legato.model.shards`). Called by the loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Protocol

import torch

from legato.model.checkpoint import Checkpoint, Progress
from legato.model.faults import CheckpointError, Problem
from legato.model.inventory import Inventory, Stored
from legato.model.shards import Regions
from legato.quant.dense import DenseExperts, DenseWeight, Triple
from legato.quant.join import concatenate
from legato.quant.stored import build, collect, stackable
from legato.quant.weight import Experts, Weight


class Residency(Enum):
    """DENSE: every weight is dequantised once, to the model's dtype. STORED: weights stay in the format of the
    checkpoint."""

    DENSE = "dense"
    STORED = "stored"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights go and as what: `dtype` is that of norms and of whatever is dense or dequantised."""

    device: torch.device
    dtype: torch.dtype
    resident: Residency


class WeightSource(Protocol):
    """Where the loader has its weights from, by the names of `legato.model.names`: a checkpoint, or a generator."""

    dtype: torch.dtype

    def float_tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that is never quantised, in `dtype` or the model's."""
        ...

    def linear(self, module: str) -> Weight:
        """The rank's part of a weight, in the format it is kept in."""
        ...

    def joined(self, modules: list[str]) -> Weight:
        """Weights over one input as one weight."""
        ...

    def dense(self, module: str, dtype: torch.dtype) -> torch.Tensor:
        """The rank's part of a weight as a plain tensor."""
        ...

    def experts(self, prefix: str, num_experts: int) -> Experts:
        """The rank's part of all experts whose modules begin with `prefix`."""
        ...

    def head(self, module: str, num_rows: int) -> Weight:
        """The rank's rows of the output head, padded to `num_rows`."""
        ...

    def rows(self, module: str, ids: tuple[int, ...]) -> Weight:
        """These rows of a weight, whichever rank's they are, as a dense one."""
        ...


class Reader:
    """Reads a rank's part of single tensors and weights, checks scale values, counts bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        inventory: Inventory,
        regions: Regions,
        placement: Placement,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.inventory, self.regions, self.progress = checkpoint, inventory, regions, progress
        self.device, self.dtype, self.resident = placement.device, placement.dtype, placement.resident
        left_out = sum(checkpoint.tensors[name].nbytes - self._nbytes(name) for name in regions)
        self.done_bytes, self.total_bytes = 0, inventory.nbytes - left_out

    def float_tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._read(name)
        return tensor.to(self.device, dtype or self.dtype)

    def stored(self, module: str) -> Weight:
        """The weight as it lies in the checkpoint, on the CPU, with its scales checked."""
        entry = self.inventory.linears[module]
        tensors = {suffix: self._read(name) for suffix, name in entry.names.items()}
        if "weight_shape" in tensors and tuple(tensors["weight_shape"].tolist()) != entry.expected.shape:
            shape = tensors["weight_shape"].tolist()
            raise self._fault(entry, "weight_shape", f"{list(entry.expected.shape)}", f"{shape}")
        weight = build(entry.format, tensors)
        if (found := weight.fault()) is not None:
            spellings = (f"weight_{found.part}", "weight_scale", "weight_scale_inv")
            suffix = next(suffix for suffix in spellings if suffix in entry.names)
            raise self._fault(entry, suffix, "finite scales above zero", found.found)
        return weight

    def linear(self, module: str) -> Weight:
        return self._place(self.stored(module))

    def joined(self, modules: list[str]) -> Weight:
        """Weights over one input as one weight."""
        return concatenate([self._place(self.stored(module)) for module in modules])

    def dense(self, module: str, dtype: torch.dtype) -> torch.Tensor:
        return self.stored(module).dequantize(dtype).to(self.device)

    def experts(self, prefix: str, num_experts: int) -> Experts:
        modules = [
            [f"{prefix}{expert}.{part}_proj" for part in ("gate", "up", "down")] for expert in range(num_experts)
        ]
        formats = [self.inventory.linears[module].format for triple in modules for module in triple]

        def triples() -> Iterator[Triple]:
            for gate, up, down in modules:
                yield self.stored(gate), self.stored(up), self.stored(down)

        stream = triples()
        first = next(stream)
        whole = chain((first,), stream)
        if self.resident is Residency.DENSE or not stackable(formats, first[0].out_features):
            return DenseExperts.collect(whole, num_experts, self.dtype, self.device)
        return collect(formats[0], whole, num_experts, self.dtype, self.device)

    def head(self, module: str, num_rows: int) -> Weight:
        """The rank's rows of the output head, with rows of zeros behind them where they are fewer than `num_rows`."""
        weight = self.linear(module)
        missing = num_rows - weight.out_features
        if not missing:
            return weight
        rows = weight.dequantize(self.dtype)
        return DenseWeight(torch.nn.functional.pad(rows, (0, 0, 0, missing)))

    def rows(self, module: str, ids: tuple[int, ...]) -> Weight:
        """Reads the whole weight a second time, which its rows may be anywhere in."""
        entry = self.inventory.linears[module]
        whole = build(entry.format, {suffix: self.checkpoint.read(name) for suffix, name in entry.names.items()})
        return DenseWeight(whole.dequantize(self.dtype)[list(ids)].to(self.device))

    def _place(self, weight: Weight) -> Weight:
        if self.resident is Residency.DENSE or isinstance(weight, DenseWeight):
            return DenseWeight(weight.dequantize(self.dtype).to(self.device))
        return weight.to(self.device)

    def _read(self, name: str) -> torch.Tensor:
        region = self.regions.get(name)
        if region is None:
            tensor = self.checkpoint.read(name)
        elif region.axis == 0:
            tensor = self.checkpoint.read_rows(name, region.start, region.stop)
        else:
            tensor = self.checkpoint.read_columns(name, region.start, region.stop)
        self.done_bytes += self._nbytes(name)
        self.progress(self.done_bytes, self.total_bytes, name)
        return tensor

    def _nbytes(self, name: str) -> int:
        info, region = self.checkpoint.tensors[name], self.regions.get(name)
        return info.nbytes if region is None else info.nbytes * (region.stop - region.start) // info.shape[region.axis]

    def _fault(self, entry: Stored, suffix: str, wanted: str, found: str) -> CheckpointError:
        info = self.checkpoint.tensors[entry.names[suffix]]
        remedy = "The checkpoint is damaged: fetch or convert it again."
        return CheckpointError(Problem(info.file, info.stored_name, wanted, found, remedy))
