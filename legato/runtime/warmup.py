"""What a runner on a GPU does before it serves: runs every shape once, and captures the graphs of the steady state.

After it nothing compiles, and decoding allocates nothing. Everything runs on row 0, which is padding: it emits nothing and stores
nothing. Called by `engine.start`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, replace

import torch

from legato.model.glm import Glm
from legato.ops.compiled import compilations, compile_ahead
from legato.plan import Extend, Plan
from legato.runtime.batch import build_batch
from legato.runtime.decode import Decoder
from legato.runtime.draw import CHOICES, PlainDraw, Variant
from legato.runtime.prompt_ends import PromptEnds
from legato.runtime.runner import Runner

LOG = logging.getLogger(__name__)

_STRIDE = 7919
"""A prime, between the ids of neighbouring tokens of the prompts that are run."""
_EDGES = (1, 2, 4, 6, 8, 16, 32, 64, 128, 132, 256, 512, 1024)
"""Row counts of the kernels' forms; 132: each multiprocessor of an H200 has a row; 1024: of 256 experts, eight a row, each has
more than a narrow product takes."""
Report = Callable[[str, int, int], None]
"""What is being done, how many steps of it are done, and of how many."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What warming up took. `pool_bytes`: the memory that all graphs share; `compilations`: kernels not found on disk."""

    compile_seconds: float
    prompt_seconds: float
    capture_seconds: float
    num_graphs: int
    pool_bytes: int
    compilations: int


def prompt_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Numbers of prompt rows at which kernels may change, on both sides of each, and a whole chunk."""
    edges = {size for edge in _EDGES for size in (edge, edge + 1)}
    return tuple(sorted({min(size, chunk_tokens) for size in (*edges, chunk_tokens)}))


@torch.inference_mode()
def warm_up(runner: Runner, report: Report) -> WarmUp | None:
    """Makes a runner ready; returns what it took, or `None` on a CPU, where there is nothing to do."""
    decoder = runner.decoder
    if decoder is None:
        return None
    before, began = compilations(), time.perf_counter()
    sizes = prompt_sizes(min(runner.settings.chunk_tokens, runner.settings.context))
    report("compiling kernels", 0, 1)
    compile_ahead(lambda: _rehearse(runner, sizes))
    torch.cuda.synchronize()
    started = time.perf_counter()
    LOG.info("%d kernels compiled in %.1f s", compilations() - before, started - began)
    captured = set(runner.ends.sizes) - {sizes[-1]} if runner.ends is not None and runner.settings.graphs else ()
    for done, size in enumerate(sizes):
        report(f"warming up prompts of {size}", done, len(sizes))
        if size in captured:
            continue  # runs before it is captured
        run_prompt(runner, size, CHOICES if size == sizes[-1] else ("greedy",))
    torch.cuda.synchronize()
    prompts_done = time.perf_counter()
    LOG.info("warm-up of prompts: %.1f s, %d kernels compiled", prompts_done - started, compilations() - before)
    pool_bytes = _capture(decoder, runner.ends, report) if runner.settings.graphs else 0
    took = WarmUp(
        compile_seconds=started - began,
        prompt_seconds=prompts_done - started,
        capture_seconds=time.perf_counter() - prompts_done,
        num_graphs=len(decoder.graphs.costs),
        pool_bytes=pool_bytes,
        compilations=compilations() - before,
    )
    LOG.info("captured %d graphs in %.1f s, %d MiB", took.num_graphs, took.capture_seconds, took.pool_bytes >> 20)
    return took


def _rehearse(runner: Runner, sizes: Collection[int]) -> None:
    """Everything that will be run, on the fewest layers that hold one of every kind."""
    few = replace(runner.iteration, target=first_of_every_kind(runner.iteration.target))
    short = copy(runner)
    short.iteration = few
    short.spec = few.target.spec
    for size in sizes:
        run_prompt(short, size, CHOICES)
    decoder = Decoder(few, runner.rows, runner.settings)
    decoder.seats.seat((0,))
    for key in decoder.graph_keys():
        if key.variant is not None:
            decoder.run(key.bucket, decoder.draw(key.variant), key.num_drafts)


def first_of_every_kind(target: Glm) -> Glm:
    """The same model cut behind the layers that bring every kind there is: full or shared, dense or sparse."""
    layers, kinds = target.weights.layers, target.spec.indexer_kinds
    pairs = [(kind, type(layer.mlp)) for kind, layer in zip(kinds, layers, strict=False)]
    count = max(pairs.index(pair) for pair in set(pairs)) + 1
    spec = replace(target.spec, num_layers=count, indexer_kinds=kinds[:count])
    return replace(target, spec=spec, weights=replace(target.weights, layers=layers[:count]))


def run_prompt(runner: Runner, size: int, variants: Collection[Variant]) -> None:
    """A chunk of a prompt, and the end of one with each way of sampling. Different tokens, so that many experts are reached."""
    tokens = tuple(position * _STRIDE % runner.spec.vocab_size for position in range(size))
    draws: list[tuple[int | None, PlainDraw]] = [(None, PlainDraw(CHOICES[variant])) for variant in variants]
    if size == runner.settings.chunk_tokens:  # others are chunks that end a prompt
        draws.append((0, PlainDraw(CHOICES["greedy"])))
    for next_token, draw in draws:
        plan = Plan(0, (), (Extend(0, 0, tokens, next_token),), (), num_drafts=runner.settings.num_drafts)
        batch = build_batch(plan, runner.rows, runner.spec)
        runner.iteration.run(batch.within(runner.settings.score_bytes), runner.rows, draw, plan.num_drafts)
    runner.rows.lengths[0].fill_(0)
    runner.rows.drafted[0].fill_(0)


def _capture(decoder: Decoder, ends: PromptEnds | None, report: Report) -> int:
    """Captures all graphs; returns the memory of their pool."""
    begun, total = 0, len(decoder.graph_keys())
    if ends is not None:
        begun, total = len(ends.sizes), total + len(ends.sizes)
        for done, size in enumerate(reversed(ends.sizes)):
            report(f"capturing ends of prompts of {size}", done, total)
            ends.capture(size)
    for done, key in enumerate(decoder.capture_all(), begun):
        report(f"capturing {key.part} of batches of {key.bucket}", done, total)
    torch.cuda.synchronize()
    return decoder.graphs.pool_bytes
