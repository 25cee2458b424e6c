"""Start-up: from settings to a warm engine. Opens the checkpoint, settles every "auto", binds ops, loads weights.

The only place that joins model, runtime and scheduler. Called by `legato.llm` and by a serving process.
"""

from __future__ import annotations

import importlib
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from legato.checkpoints import SMALL
from legato.config import PAGE_SIZE, Config, ConfigError, Resolved, resolve
from legato.engine.loop import Engine, Launcher
from legato.engine.ranks.watch import Watch
from legato.engine.room import check_weights, host_bytes, within_memory
from legato.engine.selfcheck import SelfCheck
from legato.model.checkpoint import Checkpoint, Progress, no_progress
from legato.model.footprint import weights_per_rank
from legato.model.inventory import stored_spec, survey
from legato.model.lean import DraftWeights, added_bytes, settled
from legato.model.requantization import DenseFormat, Requantization
from legato.model.spec import ModelSpec
from legato.model.weights import GlmWeights, Residency, load_weights
from legato.ops import bind
from legato.parallel import ALONE, ONE_RANK, Communicator, Mesh
from legato.runtime import prompt_ends
from legato.runtime.runner import Runner
from legato.runtime.warmup import warm_up
from legato.schedule import Limits, Scheduler

LOG = logging.getLogger(__name__)

TARGETS = {(9, 0): "sm90"}
"""Compute capability -> the target whose kernels are made for it."""
CUDA_EXTRA = ("cuda.core", "cuda.bindings")
"""Modules of the extra `cuda` that kernels need."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine and what it was built from; `watch` is over its other ranks, where it has any."""

    engine: Engine
    spec: ModelSpec
    settings: Resolved
    checkpoint: Checkpoint
    watch: Watch | None = None


def open_checkpoint(model: str | None) -> Checkpoint:
    """The checkpoint of a directory or hub id; `None`: the one that ships with the package. Raises `CheckpointError`."""
    return Checkpoint.open(SMALL if model is None else model)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One rank's part of a model, and the settings it runs by."""

    spec: ModelSpec
    weights: GlmWeights
    settings: Resolved


def start(config: Config, checkpoint: Checkpoint, progress: Progress = no_progress) -> Started:
    """Builds an engine of one rank for an opened checkpoint.

    Raises: as `load_rank`.
    """
    loaded = load_rank(config, checkpoint, progress)
    engine = build_engine(loaded.spec, loaded.weights, loaded.settings, progress=progress)
    return Started(engine, loaded.spec, loaded.settings, checkpoint)


def load_rank(
    config: Config, checkpoint: Checkpoint, progress: Progress = no_progress, mesh: Mesh = ONE_RANK
) -> Loaded:
    """Settles every "auto", binds the ops of this process and loads this rank's part of the weights.

    Raises:
        SpecError: the architecture is not supported.
        ConfigError: a setting contradicts the checkpoint or the machine.
        CheckpointError: tensors are missing, damaged or misshapen.
    """
    spec = stored_spec(checkpoint)
    settings = resolve(
        config, max_position=spec.max_position, has_mtp=spec.has_mtp, cuda_available=torch.cuda.is_available()
    )
    if not settings.num_drafts:
        spec = replace(spec, has_mtp=False)
    targets = targets_of(settings.device)
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    resident = resident_as(targets, dtype)
    drafts = DraftWeights.parse(settled(settings.draft_weights, resident))
    inventory = survey(checkpoint, spec)
    if settings.device == "cpu":
        if config.cache.memory_fraction is not None:
            raise ConfigError("memory_fraction is the share of a GPU's memory; on a CPU give --cache-tokens")
        weight_bytes = weights_per_rank(inventory, spec, mesh.size, dtype.itemsize)
        check_weights(
            weight_bytes, host_bytes(), "this machine", "a CPU keeps them unquantised; use GPUs (--device cuda)"
        )
    else:
        itemsize = dtype.itemsize if resident is Residency.DENSE else None

        def weigh() -> int:
            beside = added_bytes(spec, drafts, mesh.size, dtype.itemsize)
            return beside + weights_per_rank(inventory, spec, mesh.size, itemsize)

        settings = within_memory(settings, config, spec, weigh, _least_memory(settings.device, mesh.size))
    _set_up_process(settings, targets)
    began = time.perf_counter()
    weights = load_weights(
        checkpoint,
        spec,
        device=settings.device,
        dtype=dtype,
        resident=resident,
        progress=progress,
        mesh=mesh,
        again=Requantization(drafts, DenseFormat(settings.dense_format)),
        inventory=inventory,
    )
    LOG.info("weights: %.1f s", time.perf_counter() - began)
    return Loaded(spec, weights, settings)


def _set_up_process(settings: Resolved, targets: tuple[str, ...]) -> None:
    """What the whole process shares: threads, precision, the current device, where kernels are kept, what each op is bound to."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.device != "cpu":
        # References in float32 are law on every device; TF32 would round their products to 10 bits.
        torch.backends.cuda.matmul.allow_tf32 = False
        if ":" in settings.device:  # kernels and graphs are launched on the current device
            torch.cuda.set_device(settings.device)
    if targets and settings.kernel_cache is not None:
        importlib.import_module("legato.ops.build").STORE.directory = Path(settings.kernel_cache).expanduser()
    bind(targets, settings.ops)


def _least_memory(device: str, ranks: int) -> int:
    """Bytes of a GPU: the same number on every rank, each of which has the GPU of its own number, or their pages would differ."""
    devices = [device] if ranks == 1 else [f"cuda:{rank}" for rank in range(ranks)]
    return min(torch.cuda.get_device_properties(name).total_memory for name in devices)


def resident_as(targets: tuple[str, ...], dtype: torch.dtype) -> Residency:
    """How an engine keeps weights. Kernels read them as stored; references would dequantise them at every call: they are given
    dense ones."""
    return Residency.STORED if targets and dtype is torch.bfloat16 else Residency.DENSE


def targets_of(device: str) -> tuple[str, ...]:
    """Targets whose kernels run on a device, best first: none on a CPU, on another GPU, or where what they need is missing,
    which is logged with the remedy."""
    if device == "cpu":
        return ()
    target = TARGETS.get(torch.cuda.get_device_capability(device))
    if target is None:
        LOG.warning("no kernels are made for %s; PyTorch's run instead", torch.cuda.get_device_name(device))
        return ()
    missing = missing_packages()
    if missing:
        LOG.warning("the kernels need %s: pip install 'legato[cuda]'; PyTorch's run instead", ", ".join(missing))
        return ()
    return (target,)


def missing_packages() -> list[str]:
    """What the kernels need and cannot be imported here: a missing parent package counts, and so does a broken one."""
    missing: list[str] = []
    for name in CUDA_EXTRA:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def build_engine(
    spec: ModelSpec,
    weights: GlmWeights,
    settings: Resolved,
    communicator: Communicator = ALONE,
    progress: Progress = no_progress,
) -> Engine:
    """Scheduler and warm runner around loaded weights; the communicator is that of the weights' mesh."""
    return engine_around(build_runner(spec, weights, settings, communicator, progress), settings, spec)


def build_runner(
    spec: ModelSpec, weights: GlmWeights, settings: Resolved, communicator: Communicator, progress: Progress
) -> Runner:
    """A warm runner. All ranks of a group build theirs together: warming up makes collectives."""
    runner = Runner(spec, weights, settings, communicator)
    warm_up(runner, lambda label, done, total: progress(0, 0, f"{label} ({done + 1} of {total})"))
    return runner


def engine_around(launcher: Launcher, settings: Resolved, spec: ModelSpec) -> Engine:
    """An engine that plans within the settings' limits and launches through `launcher`."""
    check = SelfCheck(settings.verify_speculation if settings.num_drafts else 0.0)
    return Engine(Scheduler(limits_of(settings, spec)), launcher, settings.overlap, check)


def limits_of(settings: Resolved, spec: ModelSpec) -> Limits:
    """What the machine offers, by the settings."""
    return Limits(
        max_running=settings.max_running,
        chunk_tokens=settings.chunk_tokens,
        context=settings.context,
        num_drafts=settings.num_drafts,
        num_pages=settings.num_pages,
        page_size=PAGE_SIZE,
        prefix_cache=settings.prefix_cache,
        max_waiting=settings.max_waiting,
        host_pages=settings.host_pages,
        depths=settings.depths,
        layers=spec.layer_kinds,
        end_rows=max(prompt_ends.sizes_of(settings), default=0),
        end_layers=prompt_ends.LAYERS,
        slowdown=settings.slowdown,
    )
