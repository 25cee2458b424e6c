"""How long a prompt takes on one rank's share: its chunks one after the other, as the engine runs them, draft prefill included.

Owns the chunks and their figures. What runs is the engine's own (see `legato.bench.steady`); tokens that are cached already are
written, not computed. Called by `legato bench slice --prefill`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from legato.bench.kernels import KernelTime, kernel_times
from legato.bench.share import Share
from legato.bench.steady import Steady, Work, steady
from legato.bench.timing import Spread
from legato.plan import Extend, Plan
from legato.runtime.runner import Flight

_ROW = 1
"""The one request's device row."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`new` tokens behind `cached` ones, at most `chunk` in an iteration; timed `repeats` times, after one that is not."""

    new: int
    cached: int
    chunk: int
    repeats: int


@dataclass(frozen=True, slots=True)
class PrefillFigure:
    """What was measured.

    Attributes:
        spread: of the time from the first launch to the first token on the host.
        host_us: of launching all chunks, median.
        kernels: of one prompt; empty on a CPU.
        peak_bytes: of device memory while a prompt ran, beyond what was there before.
        padded_to: rows of the graph that the last chunk ran in, if it did.
    """

    spread: Spread
    host_us: float
    kernels: tuple[KernelTime, ...]
    peak_bytes: int
    padded_to: int | None


def measure_prefill(share: Share, prompt: Prompt, work: Work, device: torch.device) -> PrefillFigure:
    """Times a prompt on a share. Of `work` the number of drafts, the latent cache and the ops are used.

    Raises:
        ConfigError: the engine refuses a setting, or the caches do not fit.
    """
    made = Work(1, prompt.cached + prompt.new, work.num_drafts, 1, work.distinct_experts, work.latent, work.ops)
    state = steady(share, made, device, graphs="off")
    plans = [*_plans(prompt, share.spec.vocab_size, work.num_drafts)]
    ends = state.runner.ends
    size = None if ends is None else ends.size_of(len(plans[-1].extends[0].tokens))
    if ends is not None and size is not None:
        with torch.inference_mode():
            ends.capture(size)
    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    runs = [_run(state, plans, device) for _ in range(prompt.repeats + 1)][1:]
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    kernels = kernel_times(lambda: _run(state, plans, device)) if on_gpu else ()
    spread = Spread.of([whole for whole, _ in runs], "stream" if on_gpu else "cpu")
    return PrefillFigure(spread, statistics.median(host for _, host in runs), kernels, peak, size)


def prefill_fields(share: Share, prompt: Prompt, figure: PrefillFigure, case: Mapping[str, Any]) -> dict[str, Any]:
    """As one line of a record, without the setting. `case`: what else tells figures apart."""
    return {
        "bench": "prefill",
        "name": share.spec.name,
        "implementation": "chunks",
        "case": {**share.fields, **case},
        "new_tokens": prompt.new,
        "cached_tokens": prompt.cached,
        "chunk_tokens": prompt.chunk,
        **figure.spread.fields,
        "host_us": figure.host_us,
        "padded_to": figure.padded_to,
        "repeats": prompt.repeats,
        "tokens_per_s": 1e6 * prompt.new / figure.spread.median_us,
        "kernels": sum(kernel.calls for kernel in figure.kernels) or None,
        "kernels_us": sum(kernel.total_us for kernel in figure.kernels) or None,
        "peak_bytes": figure.peak_bytes or None,
        "cached_synthetic": prompt.cached > 0,
        "correct": None,  # one rank's share: what the tokens are is the tests' business
    }


def _plans(prompt: Prompt, vocab_size: int, num_drafts: int) -> Iterator[Plan]:
    """One iteration for each chunk; the last one samples the first token."""
    tokens = torch.randint(vocab_size, (prompt.new,), generator=torch.Generator().manual_seed(0)).tolist()
    for first in range(0, prompt.new, prompt.chunk):
        last = min(first + prompt.chunk, prompt.new)
        following = tokens[last] if last < prompt.new else None
        extend = Extend(_ROW, prompt.cached + first, tuple(tokens[first:last]), following)
        yield Plan(1, (), (extend,), (), num_drafts=num_drafts)


def _run(state: Steady, plans: list[Plan], device: torch.device) -> tuple[float, float]:
    """Microseconds until the first token, and of host time to launch all chunks; one in flight while the next is launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began, host = time.perf_counter(), 0.0
    flight: Flight | None = None
    for plan in plans:
        launching = time.perf_counter()
        launched = state.runner.launch(plan)
        host += time.perf_counter() - launching
        if flight is not None:
            flight.outcome()
        flight = launched
    assert flight is not None, "a prompt has tokens"
    flight.outcome()
    return 1e6 * (time.perf_counter() - began), 1e6 * host
