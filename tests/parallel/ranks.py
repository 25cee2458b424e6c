"""Ranks of the shipped checkpoint as processes that meet over gloo, and the tokens that each of them generates.

Started by the tests beside it; every rank runs an engine of its own over the same requests, as a tensor-parallel group does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.queues import Queue
from tempfile import TemporaryDirectory

import torch
from torch import distributed

from legato.checkpoints import SMALL
from legato.config import Config, resolve
from legato.engine.start import build_engine
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.weights import Residency, load_weights
from legato.parallel import ALONE, Communicator, DistributedRank, Mesh
from legato.schedule import Request
from legato.types import SamplingParams, TokenLogprob

Prompts = Sequence[tuple[int, ...]]
Answer = list[tuple[int, tuple[float, ...]]]
"""Tokens with the two best log-probabilities at each place."""


@dataclass(frozen=True)
class Job:
    """What all ranks do. `temperature` 0 is greedy."""

    prompts: Prompts
    max_tokens: int
    num_drafts: int
    temperature: float = 0.0


def answers(job: Job, communicator: Communicator) -> list[Answer]:
    """One rank's answers; `communicator` says which."""
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(SMALL)
    spec = stored_spec(checkpoint)
    weights = load_weights(
        checkpoint, spec, device="cpu", dtype=torch.float32, resident=Residency.DENSE, mesh=communicator.mesh
    )
    settings = resolve(Config(), max_position=spec.max_position, has_mtp=True, cuda_available=False)
    settings = replace(settings, num_drafts=job.num_drafts, context=1024, cache_tokens=8192)
    engine = build_engine(spec, weights, settings, communicator)
    params = SamplingParams(max_tokens=job.max_tokens, temperature=job.temperature, ignore_eos=True, logprobs=2)
    found: dict[str, Answer] = {}
    for number, prompt in enumerate(job.prompts):
        found[f"r{number}"] = []
        engine.submit(Request(f"r{number}", prompt, params, (), 1000 + number))
    while engine.has_work:
        for progress in engine.turn():
            logprobs: Sequence[TokenLogprob] = progress.logprobs or ()
            for token, logprob in zip(progress.tokens, logprobs, strict=True):
                found[progress.request_id].append((token, tuple(value for _, value in logprob.top[:2])))
    return list(found.values())


def of_one(job: Job) -> list[Answer]:
    """The same from a model that is not sharded."""
    return answers(job, ALONE)


def of_group(job: Job, size: int) -> list[list[Answer]]:
    """The answers of every rank of a group; the caller is rank 0, the others are processes that end with it."""
    context = get_context("spawn")
    queue = context.Queue()
    with TemporaryDirectory() as folder:  # they meet in a file: a port that is free now may be another's in a moment
        place = f"file://{folder}/place"
        others = [
            context.Process(target=_rank, args=(job, Mesh(n, size), place, queue), daemon=True) for n in range(1, size)
        ]
        for other in others:
            other.start()
        try:
            found = [(0, _joined(job, Mesh(0, size), place)), *(queue.get(timeout=300) for _ in others)]
        finally:
            for other in others:
                other.join(20)
                other.kill()
    return [tokens for _, tokens in sorted(found, key=lambda pair: pair[0])]


def _rank(job: Job, mesh: Mesh, place: str, queue: Queue) -> None:
    queue.put((mesh.rank, _joined(job, mesh, place)))


def _joined(job: Job, mesh: Mesh, place: str) -> list[Answer]:
    distributed.init_process_group(
        "gloo",
        init_method=place,
        rank=mesh.rank,
        world_size=mesh.size,
        timeout=timedelta(minutes=4),
    )
    try:
        return answers(job, DistributedRank(mesh))
    finally:
        distributed.destroy_process_group()
