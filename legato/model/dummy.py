"""Weights of a rank without a checkpoint: drawn on the device, with the statistics that decide how long kernels take.

Owns what is drawn: scales at which the residual stream stays a token's own, quantised values of normal ones, and a router that
reaches a chosen number of experts. Must not be used to generate text. Called by `legato.bench.share`.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from legato.model.convert import QUANTIZERS, Target, layout
from legato.model.names import Expected, Group, Kind, Split, expected, layer_prefix
from legato.model.requantization import AS_STORED, Requantization, finish_of
from legato.model.shards import share_of, vocabulary_rows
from legato.model.spec import ModelSpec, SpecError
from legato.model.weights import GlmWeights, LayerWeights, MoeWeights, assemble
from legato.parallel.mesh import Mesh
from legato.quant.dense import DenseWeight, Triple
from legato.quant.formats import Format, split_multiple
from legato.quant.join import concatenate
from legato.quant.stored import collect
from legato.quant.weight import Experts, Weight

DRAWN_EXPERTS = 16
"""Experts that are drawn; the others, and those of every further layer of the format, are copies in another order. A copy is read
from its own memory, which is what counts."""


_FIRST_EXPERT = "mlp.experts.0.gate_proj"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to draw.

    Attributes:
        target: which linears are quantised, as `legato quantize` would; `None`: none of them.
        spread: of the router's correction biases, see `router_spread`; 0 makes all experts equally likely.
        seed: of everything; what ranks hold in common is the same on all of them.
    """

    target: Target | None
    spread: float = 0.0
    seed: int = 0

    def layout(self, entry: Expected, spec: ModelSpec) -> Format:
        """The format of one linear."""
        return Format.DENSE if self.target is None else layout(self.target, entry, spec)


class DummyReader:
    """Gives the loader what `legato.model.reader.Reader` would, from a random generator in place of files.

    Raises:
        SpecError: a width does not divide over the ranks, as when loading.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype, self._device = dtype, device
        self._spec, self._mesh, self._recipe = spec, mesh, recipe
        self._entries = {entry.name: entry for entry in expected(spec)}
        self._templates: dict[Format, Experts] = {}
        self._layers_left = Counter(
            recipe.layout(entry, spec) for entry in self._entries.values() if entry.name.endswith(_FIRST_EXPERT)
        )
        self._num_layers_drawn = 0

    def float_tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        entry = self._entries[name]
        drawn = self._normal(entry, entry.shape)
        if name.endswith("e_score_correction_bias"):
            drawn *= self._recipe.spread
        elif name.endswith("k_norm.bias"):
            drawn *= 0.1
        elif entry.group is Group.NORMS or name.endswith("norm.weight"):
            drawn = 1 + 0.1 * drawn
        return drawn.to(dtype or self.dtype)

    def linear(self, module: str) -> Weight:
        entry = self._entries[module]
        rows, columns = self._local_shape(entry)
        return self._quantized(self._recipe.layout(entry, self._spec), self._matrix(entry, rows, columns))

    def joined(self, modules: list[str]) -> Weight:
        return concatenate([self.linear(module) for module in modules])

    def dense(self, module: str, dtype: torch.dtype) -> Tensor:
        entry = self._entries[module]
        return self._matrix(entry, *self._local_shape(entry)).to(dtype)

    def head(self, module: str, num_rows: int) -> Weight:
        entry = self._entries[module]
        return DenseWeight(self._matrix(entry, num_rows, entry.shape[1]))

    def rows(self, module: str, ids: tuple[int, ...]) -> Weight:
        entry = self._entries[module]
        return DenseWeight(self._matrix(entry, len(ids), entry.shape[1]))

    def experts(self, prefix: str, num_experts: int) -> Experts:
        names = [f"{prefix}0.{part}_proj" for part in ("gate", "up", "down")]
        entries = [self._entries[name] for name in names]
        stored = self._recipe.layout(entries[0], self._spec)
        if self._device.type == "cuda":
            # What the layer before left free would be cut into pieces: memory that almost fits the weights has no room for gaps.
            torch.cuda.empty_cache()
        if stored not in self._templates:
            triples = self._triples(stored, entries, num_experts)
            self._templates[stored] = collect(stored, triples, num_experts, self.dtype, self._device)
        self._num_layers_drawn += 1
        self._layers_left[stored] -= 1
        if not self._layers_left[stored]:
            return self._templates.pop(stored)  # nobody copies it any more
        return _rolled(self._templates[stored], self._num_layers_drawn)

    def head_rows(self) -> int:
        """Rows of this rank's output head."""
        stored = self._recipe.layout(self._entries["lm_head"], self._spec)
        return vocabulary_rows(self._spec, split_multiple(stored, 0), self._mesh)

    def _triples(self, stored: Format, entries: list[Expected], num_experts: int) -> Iterator[Triple]:
        drawn: list[Triple] = []
        for expert in range(min(num_experts, DRAWN_EXPERTS)):
            gate, up, down = (
                self._quantized(stored, self._matrix(entry, *self._local_shape(entry), salt=expert))
                for entry in entries
            )
            drawn.append((gate, up, down))
        for expert in range(num_experts):
            yield drawn[expert % len(drawn)]

    def _local_shape(self, entry: Expected) -> tuple[int, int]:
        rows, columns = entry.shape
        if entry.split is Split.REPLICATED:
            return rows, columns
        start, stop = share_of(entry, self._recipe.layout(entry, self._spec), self._spec, self._mesh)
        return (stop - start, columns) if entry.split is Split.ROWS else (rows, stop - start)

    def _matrix(self, entry: Expected, rows: int, columns: int, salt: int = 0) -> Tensor:
        """Normal values that keep an input of unit variance at unit variance; what is added to the residual stream stays small
        beside a token's embedding, or all rows would end up alike and choose the same experts."""
        gain = 1 / math.sqrt(entry.shape[1])
        if entry.name.endswith(("o_proj", "down_proj")):
            gain *= 1 / math.sqrt(2 * self._spec.num_layers)
        return self._normal(entry, (rows, columns), salt).mul_(gain)

    def _normal(self, entry: Expected, shape: tuple[int, ...], salt: int = 0) -> Tensor:
        rank = 0 if entry.split is Split.REPLICATED else self._mesh.rank
        seed = zlib.crc32(f"{self._recipe.seed} {entry.name} {rank} {salt}".encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        return torch.empty(shape, dtype=self.dtype, device=self._device).normal_(generator=generator)

    def _quantized(self, stored: Format, matrix: Tensor) -> Weight:
        return DenseWeight(matrix) if stored is Format.DENSE else QUANTIZERS[stored](matrix)


def dummy_weights(
    spec: ModelSpec,
    mesh: Mesh,
    recipe: Recipe,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    again: Requantization = AS_STORED,
) -> GlmWeights:
    """The weights of a rank: the shapes, formats and layers that `load_weights` would give for a checkpoint of `recipe.target`.

    Raises:
        SpecError: a width does not divide over the ranks.
    """
    reader = DummyReader(spec, mesh, recipe, torch.device(device), dtype)
    formats = {entry.name: recipe.layout(entry, spec) for entry in expected(spec) if entry.kind is Kind.LINEAR}
    return assemble(spec, reader, reader.head_rows(), mesh, again.drafts, finish_of(again.dense, formats))


def rerouted(weights: GlmWeights, spec: ModelSpec, mesh: Mesh, recipe: Recipe) -> GlmWeights:
    """The same drawn weights with the routers of another `recipe.spread`."""
    reader = DummyReader(spec, mesh, recipe, weights.embed.device, weights.embed.dtype)

    def layer(number: int, one: LayerWeights) -> LayerWeights:
        if not isinstance(one.mlp, MoeWeights):
            return one
        bias = reader.float_tensor(layer_prefix(number) + "mlp.gate.e_score_correction_bias", one.mlp.bias.dtype)
        return replace(one, mlp=replace(one.mlp, bias=bias))

    layers, mtp = tuple(layer(number, one) for number, one in enumerate(weights.layers)), weights.mtp
    if mtp is not None:
        mtp = replace(mtp, layer=layer(spec.num_layers, mtp.layer), seeded=layer(spec.num_layers, mtp.seeded))
    return replace(weights, layers=layers, mtp=mtp)


@lru_cache(maxsize=8)
def router_spread(spec: ModelSpec, distinct: float, rows: int) -> float:
    """The spread of correction biases at which `rows` unrelated rows choose `distinct` experts between them, on average.

    Found by bisection over a simulation of the router: logits of unit variance, biases normal. Biases of spread 0 give what even
    routing gives, E (1 - (1 - A/E)^rows), the most that can be had.

    Raises:
        SpecError: so many, or so few, experts cannot be reached.
    """
    experts, chosen = spec.num_experts, spec.experts_per_token
    most = experts * (1 - (1 - chosen / experts) ** rows)
    if not chosen <= distinct <= math.ceil(most):
        raise SpecError(
            "n_routed_experts",
            f"{rows} rows choose between {chosen} and {most:.1f} of {experts} experts on average, not {distinct:g}",
        )
    if distinct >= math.floor(most):
        return 0.0
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(_GROUPS, rows, experts, generator=generator).sigmoid()
    bias = torch.randn(experts, generator=generator)

    def reached(spread: float) -> float:
        ids = (scores + spread * bias).topk(chosen, dim=-1).indices.view(_GROUPS, -1)
        used = torch.zeros(_GROUPS, experts, dtype=torch.bool).scatter_(1, ids, True)
        return float(used.sum(1).float().mean())

    low, high = 0.0, 16.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > distinct else (low, middle)
    return high


_GROUPS = 128
"""Groups of rows that the simulation of a router draws."""


def _rolled(template: Experts, places: int) -> Experts:
    """The experts in another order, in memory of their own."""
    moved: dict[str, Any] = {}
    for field in fields(template):  # type: ignore[arg-type]
        tensor = getattr(template, field.name)
        octets = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        moved[field.name] = octets.roll(places, 0).view(tensor.dtype)
    return replace(template, **moved)  # type: ignore[type-var]
