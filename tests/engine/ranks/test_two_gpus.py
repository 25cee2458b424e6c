"""An engine of two ranks on two GPUs gives the tokens of one GPU in float32, and names a rank that stops."""

import os
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


def test_a_stopped_rank_is_named(pair: LLM) -> None:
    """The last test: the ranks are gone after it."""
    os.kill(pair._engine.runner._ranks.board.signs(1).pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1"):
        pair.generate(PROMPTS, SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True))
    assert time.monotonic() - began < 6
