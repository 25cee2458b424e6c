"""One rank's part of a model, from a checkpoint or drawn, with the communicator it runs alone with.

Owns the choice of layers and the count of bytes behind the floor. Times nothing. Called by `legato bench slice`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from legato.bench.roofline import Traffic, traffic_of
from legato.model.checkpoint import Checkpoint, Progress, no_progress
from legato.model.convert import Target
from legato.model.dummy import Recipe, dummy_weights, rerouted, router_spread
from legato.model.footprint import bytes_per_rank
from legato.model.inventory import survey
from legato.model.names import Kind, expected, layer_prefix
from legato.model.requantization import AS_STORED, Requantization
from legato.model.spec import ModelSpec, SpecError
from legato.model.weights import GlmWeights, Residency, load_weights
from legato.parallel import LoopBack, Mesh
from legato.quant.formats import Format


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a model. `traffic`: the bytes that its iterations read."""

    spec: ModelSpec
    weights: GlmWeights
    communicator: LoopBack
    traffic: Traffic

    @property
    def fields(self) -> dict[str, int]:
        """Which part of how much it is, as a line of a record names it."""
        mesh = self.communicator.mesh
        return {"tp": mesh.size, "rank": mesh.rank, "layers": self.spec.num_layers}


def first_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model of the first `num_layers` decoder layers, with its MTP layer. Raises `SpecError` for more than there are."""
    if not 1 <= num_layers <= spec.num_layers:
        raise SpecError("num_hidden_layers", f"the model has {spec.num_layers} layers; asked for {num_layers}")
    kinds = spec.indexer_kinds[:num_layers]
    return replace(spec, num_layers=num_layers, indexer_kinds=kinds, first_dense=min(spec.first_dense, num_layers))


def drawn(
    spec: ModelSpec,
    mesh: Mesh,
    target: Target | None,
    device: torch.device,
    dtype: torch.dtype,
    again: Requantization = AS_STORED,
) -> Share:
    """A share of random weights in the format of `target`, with even routing.

    Raises:
        SpecError: the ranks do not divide a width.
    """
    weights = dummy_weights(spec, mesh, Recipe(target), device=device, dtype=dtype, again=again)
    return Share(spec, weights, LoopBack(mesh), _traffic(spec, _formats(spec, target), mesh, again, weights))


def drawn_bytes(spec: ModelSpec, mesh: Mesh, target: Target | None) -> int:
    """What the weights of such a share take."""
    formats = _formats(spec, target)
    return sum(bytes_per_rank(entry, formats.get(entry.name), mesh.size) for entry in expected(spec))


def _formats(spec: ModelSpec, target: Target | None) -> dict[str, Format]:
    """Of the linears, by name, where weights are drawn."""
    recipe = Recipe(target)
    return {entry.name: recipe.layout(entry, spec) for entry in expected(spec) if entry.kind is Kind.LINEAR}


def routed(share: Share, distinct_experts: float | None, rows: int) -> Share:
    """A drawn share whose routers let `rows` rows reach so many experts between them; `None`: even routing.

    Raises:
        SpecError: the router cannot reach so many, or so few.
    """
    spread = 0.0 if distinct_experts is None else router_spread(share.spec, distinct_experts, rows)
    weights = rerouted(share.weights, share.spec, share.communicator.mesh, Recipe(None, spread))
    return replace(share, weights=weights)


def loaded(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    again: Requantization = AS_STORED,
    progress: Progress = no_progress,
) -> Share:
    """A share of a checkpoint, in its own formats.

    Raises:
        CheckpointError, SpecError: as loading does.
    """
    inventory = survey(checkpoint, spec)
    weights = load_weights(
        checkpoint,
        spec,
        device=device,
        dtype=dtype,
        resident=Residency.STORED,
        progress=progress,
        mesh=mesh,
        again=again,
        inventory=inventory,
    )
    formats = {name: stored.format for name, stored in inventory.linears.items()}
    return Share(spec, weights, LoopBack(mesh), _traffic(spec, formats, mesh, again, weights))


def _traffic(
    spec: ModelSpec, formats: Mapping[str, Format], mesh: Mesh, again: Requantization, weights: GlmWeights
) -> Traffic:
    found = traffic_of(spec, again.formats(formats, spec), mesh.size)
    if weights.mtp is not None:
        name = f"{layer_prefix(spec.num_layers)}eh_proj"
        entry = next(entry for entry in expected(spec) if entry.name == name)
        stored, projection = bytes_per_rank(entry, formats[name], mesh.size), weights.mtp.eh_proj.weight
        elements = projection.out_features * projection.in_features
        is_dense = projection.format is Format.DENSE
        now = stored * elements // math.prod(entry.shape) if is_dense else projection.nbytes
        found = replace(found, mtp=found.mtp - stored + now)
    return found if weights.draft_head is None else replace(found, draft_head=weights.draft_head.nbytes)
