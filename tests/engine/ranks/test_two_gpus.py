"""An engine of two ranks on two GPUs gives the tokens of one GPU in float32, those of no graphs with graphs, and names a rank
that stops."""

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from legato.config import CacheConfig, Config, ExecutionConfig, ScheduleConfig
from legato.engine.ranks.watch import RankLost
from legato.llm import LLM
from legato.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = ["def fibonacci(n):", "import os\n", "class Queue:", "for i in range(10):"]


def started(ranks: int) -> LLM:
    """In float32: in bfloat16 other sums leave at near-ties."""
    return LLM(
        config=Config(
            cache=CacheConfig(tokens=8192),
            schedule=ScheduleConfig(context=1024, max_running=4, chunk_tokens=16),
            execution=ExecutionConfig(device="cuda", dtype="float32", graphs="off", tensor_parallel=ranks),
        )
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    two = started(2)
    yield two
    two._engine.runner._ranks.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_gpus_give_the_tokens_of_one(temperature: float, pair: LLM) -> None:
    params = SamplingParams(max_tokens=96, temperature=temperature, seed=7, ignore_eos=True)
    one, two = started(1).generate(PROMPTS, params), pair.generate(PROMPTS, params)
    assert [completion.token_ids for completion in one] == [completion.token_ids for completion in two]


ENDS = (1, 16, 17, 64, 65, 128, 129, 256, 300, 512)
"""Tokens of prompts, each of which ends in one pass: on both sides of the sizes to which they are padded."""


def tokens_of_ends(graphs: str) -> list[list[int]]:
    """Behind prompts one after the other, greedy and drawn, in bfloat16: the kernels of two ranks, and their inboxes."""
    llm = LLM(
        config=Config(
            cache=CacheConfig(tokens=8192),
            schedule=ScheduleConfig(context=1024, max_running=2, chunk_tokens=512),
            execution=ExecutionConfig(device="cuda", graphs=graphs, tensor_parallel=2),  # type: ignore[arg-type]
        )
    )
    try:
        ends = llm._engine.runner._joined.runner.ends
        captured = {key.bucket for key in ends.graphs.costs if key.part == "prompt"}
        assert captured == (set(ends.sizes) if graphs == "auto" else set())
        drawn, found = random.Random(5), []
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=7, ignore_eos=True)
            for length in ENDS:
                prompt = [drawn.randrange(100, 8000) for _ in range(length)]
                found.append(list(llm.generate([prompt], params)[0].token_ids))
        return found
    finally:
        llm._engine.runner._ranks.close()


def test_ends_of_prompts_as_graphs_give_the_tokens_of_no_graphs() -> None:
    assert tokens_of_ends("auto") == tokens_of_ends("off")


def test_a_stopped_rank_is_named(pair: LLM) -> None:
    """The last test: the ranks are gone after it."""
    os.kill(pair._engine.runner._ranks.board.signs(1).pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1"):
        pair.generate(PROMPTS, SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True))
    assert time.monotonic() - began < 6
