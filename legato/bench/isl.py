"""Iteration time and tokens per second over the length of the context.

Owns the ablation: the same engine, prompts of held-out code of growing length. Runs in this process, so that nothing but the
engine is timed. Called by `legato bench isl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from legato.bench.load.prompts import Source
from legato.bench.roofline import Traffic
from legato.config import ConfigError
from legato.llm import LLM
from legato.types import SamplingParams


@dataclass(frozen=True, slots=True)
class LengthPoint:
    """One length. Times in seconds; `prefill_s` is the time to the first token, `iteration_s` the mean over the iterations
    that only decode; accept length apart from both."""

    input_tokens: int
    output_tokens: int
    prefill_s: float
    iteration_s: float
    accept_length: float
    tokens_per_s: float
    floor_s: float | None

    def fields(self, llm: LLM) -> dict[str, Any]:
        """As one line of a record, without the setting."""
        iteration_us = 1e6 * self.iteration_s
        return {
            "bench": "isl",
            "name": llm.spec.name.rpartition("/")[2],
            "implementation": llm.settings.device,
            "case": {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens},
            "batch": 1,
            "context": self.input_tokens,
            "k": llm.settings.num_drafts,
            "median_us": iteration_us,
            "prefill_s": self.prefill_s,
            "tokens_per_s": self.tokens_per_s,
            "accept_length": self.accept_length,
            "accept_length_simulated": False,
            "floor_us": None if self.floor_s is None else 1e6 * self.floor_s,
            "roofline_percent": None if self.floor_s is None else 100 * self.floor_s / self.iteration_s,
            "correct": None,  # speed only: what the tokens are is the tests' business
        }


def measure(
    llm: LLM,
    lengths: Sequence[int],
    output_tokens: int,
    traffic: Traffic | None,
    bytes_per_s: float | None,
    watch: Callable[[int], None] = lambda _: None,
) -> Iterator[LengthPoint]:
    """Points in the order of `lengths`, greedy, one request at a time, after one short request to warm up.

    Raises:
        ConfigError: a length and the output together do not fit the engine's context.
    """
    if not lengths or min(lengths) < 1 or output_tokens < 2:
        raise ConfigError(
            "--lengths must be numbers of at least 1, separated by commas, and --output-tokens at least 2"
        )
    longest = max(lengths) + output_tokens
    if longest > llm.settings.context:
        raise ConfigError(f"--lengths: {longest} tokens with the output, but the context is {llm.settings.context}")
    tokens = _tokens(llm, max(lengths))
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    llm.generate([tokens[:16]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    for length in lengths:
        watch(length)
        # A different start each time: nothing of the prompt may be in the prefix cache.
        prompt = (tokens[length % 997], *tokens[-(length - 1) :]) if length > 1 else tokens[:1]
        llm.reset_stats()
        start, first = time.perf_counter(), 0.0
        for delta in llm.stream(prompt, params):
            if not first and delta.token_ids:
                first = time.perf_counter() - start
        stats = llm.stats
        rounds = sum(stats.accepted_at)
        iteration = stats.decode_seconds / (stats.decoded_tokens / stats.accept_length)
        floor = None
        if traffic is not None and bytes_per_s is not None and rounds:
            floor = traffic.iteration(1, llm.settings.num_drafts, length + output_tokens // 2) / bytes_per_s
        yield LengthPoint(length, output_tokens, first, iteration, stats.accept_length, stats.tokens_per_second, floor)


def _tokens(llm: LLM, count: int) -> tuple[int, ...]:
    """Held-out code, as many tokens as are asked for."""
    found: list[int] = []
    for session in Source("held-out").sessions(10_000):
        found += llm.encode(session.turns[0])
        if len(found) > count:
            return tuple(found)
    raise ConfigError(f"--lengths: the held-out code gives {len(found)} tokens, {count} are asked for")
