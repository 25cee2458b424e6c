"""An engine of two ranks on two GPUs: the tokens of one GPU, but for near-ties in bfloat16; a rank that stops is named."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from legato.config import CacheConfig, Config, DType, ExecutionConfig, ScheduleConfig
from legato.engine.ranks.watch import RankLost
from legato.llm import LLM
from legato.types import Completion, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = ["def fibonacci(n):", "import os\n", "class Queue:", "for i in range(10):"]
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
"""Most that the two best log-probabilities may lie apart where two ranks choose otherwise than one. In bfloat16, logits between 8
and 32 are 0.06 to 0.25 apart."""


def started(ranks: int, dtype: DType) -> LLM:
    return LLM(
        config=Config(
            cache=CacheConfig(tokens=8192),
            schedule=ScheduleConfig(context=1024, max_running=4, chunk_tokens=64),
            execution=ExecutionConfig(device="cuda", dtype=dtype, tensor_parallel=ranks, rank_patience=2.0),
        )
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[DType, LLM, LLM]]:
    one, two = started(1, request.param), started(2, request.param)
    yield request.param, one, two
    two._engine.runner._ranks.close()


def margin_of_first_difference(one: Completion, two: Completion) -> float | None:
    """How far apart one GPU's two best choices lie where the other's tokens begin to differ; None where they never do."""
    for here, there, logprob in zip(one.token_ids, two.token_ids, one.logprobs or (), strict=True):
        if here != there:
            (_, best), (_, second) = logprob.top[:2]
            return best - second
    return None


def test_two_gpus_give_the_tokens_of_one(pair: tuple[DType, LLM, LLM]) -> None:
    dtype, one, two = pair
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True, logprobs=2)
    margins = [
        margin_of_first_difference(*both)
        for both in zip(one.generate(PROMPTS, params), two.generate(PROMPTS, params), strict=True)
    ]
    print(dtype, "margins where tokens first differ:", margins)
    assert all(margin is None or margin <= NEAR_TIE[dtype] for margin in margins)
    # The same without log-probabilities, which is the path of graphs.
    graphs = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
    assert [c.token_ids for c in two.generate(PROMPTS, graphs)] == [c.token_ids for c in two.generate(PROMPTS, params)]


def test_a_stopped_rank_is_named(pair: tuple[DType, LLM, LLM]) -> None:
    """The last test of its pair: the ranks are gone after it."""
    two = pair[2]
    os.kill(two._engine.runner._ranks.board.signs(1).pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1"):
        two.generate(PROMPTS, SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True))
    assert time.monotonic() - began < 5
